import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import com.alibaba.fastjson2.JSONWriter;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;

/**
 * A program driven by lines of JSON: one question a line on standard input, one answer a line on standard output. A question is
 * {"do": name, ...}; an answer is {"answer": ...} or {"error": text}. The program ends when its input does.
 */
final class Lines {
    private static final PrintStream ANSWERS = System.out;

    interface Answering {
        Object answer(JSONObject question) throws Exception;
    }

    private Lines() {
    }

    /** From now on what others print goes to standard error; called before anything can print. */
    static void keepOutputForAnswers() {
        System.setOut(System.err);
    }

    static void serve(Answering answering) throws Exception {
        BufferedReader questions = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = questions.readLine(); line != null; line = questions.readLine()) {
            JSONObject answer = new JSONObject();
            try {
                answer.put("answer", answering.answer(JSON.parseObject(line)));
            } catch (Throwable error) {
                error.printStackTrace();
                answer.put("error", error.toString());
            }
            ANSWERS.write((answer.toJSONString(JSONWriter.Feature.WriteNulls) + "\n").getBytes(StandardCharsets.UTF_8));
            ANSWERS.flush();
        }
        System.exit(0);
    }
}
