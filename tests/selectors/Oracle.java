import com.alibaba.fastjson2.JSON;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.StringReader;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.broker.filter.MessageEvaluationContext;
import org.apache.rocketmq.filter.expression.BooleanExpression;
import org.apache.rocketmq.filter.expression.MQFilterException;
import org.apache.rocketmq.filter.parser.ParseException;
import org.apache.rocketmq.filter.parser.SelectorParser;

/** Evaluates expressions with RocketMQ's own classes. Input: a list of property maps, then one expression a line, as JSON. */
public class Oracle {
    public static void main(String[] arguments) throws Exception {
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        List<Map<String, String>> messages = (List<Map<String, String>>) (List) JSON.parseArray(input.readLine(), Map.class);
        java.io.PrintStream output = new java.io.PrintStream(System.out, false, "UTF-8");
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            output.println(JSON.toJSONString(evaluate((String) JSON.parse(line), messages)));
        }
        output.flush();
    }

    private static Map<String, Object> evaluate(String text, List<Map<String, String>> messages) {
        Map<String, Object> result = new LinkedHashMap<>();
        result.put("expression", text);
        try {
            BooleanExpression expression = SelectorParser.parse(text);
            result.put("answers", answers(expression, messages));
            if (!endsThere(text)) {
                result.put("ignores_the_rest", true);
            }
        } catch (MQFilterException refused) {
            result.put("refused", true);
            if (refused.getCause() instanceof ParseException) {
                ParseException broken = (ParseException) refused.getCause();
                if (broken.currentToken != null) {
                    result.put("column", broken.currentToken.next.beginColumn);
                }
            }
        }
        return result;
    }

    /** Returns one letter for each message: true, false, null, or an error that ends the evaluation. */
    private static String answers(BooleanExpression expression, List<Map<String, String>> messages) {
        StringBuilder letters = new StringBuilder();
        for (Map<String, String> properties : messages) {
            try {
                Object value = expression.evaluate(new MessageEvaluationContext(properties));
                letters.append(value == null ? 'n' : (Boolean) value ? 't' : 'f');
            } catch (Exception error) {
                letters.append('e');
            }
        }
        return letters.toString();
    }

    /** Returns true if the parser read the whole text: it stops after a complete condition. */
    private static boolean endsThere(String text) {
        try {
            SelectorParser parser = new SelectorParser(new StringReader(text));
            parser.JmsSelector();
            return parser.getNextToken().kind == 0;
        } catch (Throwable more) {
            return false;
        }
    }
}
