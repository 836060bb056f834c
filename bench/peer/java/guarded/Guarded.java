import java.util.Arrays;

/**
 * Runs another main class, and ends the process when standard input ends: so nothing outlives whoever started it.
 *
 * Arguments: the class, then its own arguments.
 */
public final class Guarded {
    private Guarded() {
    }

    public static void main(String[] args) throws Exception {
        Thread guard = new Thread(() -> {
            try {
                while (System.in.read() >= 0) { } // only its end is of interest
            } catch (java.io.IOException ended) {
                System.err.println(ended);
            }
            System.exit(0);
        });
        guard.setDaemon(true);
        guard.start();
        Class.forName(args[0]).getMethod("main", String[].class).invoke(null, (Object) Arrays.copyOfRange(args, 1, args.length));
    }
}
