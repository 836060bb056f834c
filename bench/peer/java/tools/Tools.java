import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Runs many mqadmin commands in one JVM. Standard input has one command per line: its arguments, separated by the character 0x1f.
 * Prints one line for each: the output of the command as Base64.
 */
public final class Tools {
    private Tools() {
    }

    public static void main(String[] args) throws Exception {
        PrintStream results = System.out;
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            ByteArrayOutputStream printed = new ByteArrayOutputStream();
            System.setOut(new PrintStream(printed, true, StandardCharsets.UTF_8));
            MQAdminStartup.main0(line.split("\u001f"), null);
            results.println(Base64.getEncoder().encodeToString(printed.toByteArray()));
        }
        System.exit(0);
    }
}
