import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import com.alibaba.fastjson2.JSONWriter;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;

/**
 * Runs commands from standard input, one line of JSON each: {"command": name, ...}. Prints one line for each: {"result": ...} or
 * {"error": text}. The process exits at the end of the input.
 */
final class CommandLoop {
    private static final PrintStream RESULTS = System.out;

    interface Handler {
        Object run(JSONObject command) throws Exception;
    }

    private CommandLoop() {
    }

    /** Redirect other output to standard error. Call it before a library can print. */
    static void reserveOutput() {
        System.setOut(System.err);
    }

    static void serve(Handler handler) throws Exception {
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            JSONObject result = new JSONObject();
            try {
                result.put("result", handler.run(JSON.parseObject(line)));
            } catch (Throwable error) {
                error.printStackTrace();
                result.put("error", error.toString());
            }
            RESULTS.write((result.toJSONString(JSONWriter.Feature.WriteNulls) + "\n").getBytes(StandardCharsets.UTF_8));
            RESULTS.flush();
        }
        System.exit(0);
    }
}
