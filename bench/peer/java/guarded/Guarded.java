import java.lang.management.LockInfo;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadInfo;
import java.util.Arrays;
import java.util.List;
import java.util.Objects;
import java.util.Set;
import java.util.stream.Collectors;

/**
 * Runs another main class in a process that ends with its parent: it exits when standard input is closed.
 *
 * A shutdown of RocketMQ waits several times without need: for threads that only sleep, and 3 s before it closes the store.
 * Interrupts end these waits. The shutdown itself is RocketMQ's own. So is the shutdown of a client, which waits up to 3 s.
 *
 * Arguments: the class, then its own arguments.
 */
public final class Guarded {
    /** Services that may be interrupted. Threads of the store are not among them: an interrupt would close their files. */
    private static final List<String> SERVICES = List.of("$NettyEventExecutor", ".PopBufferMergeService", ".PopReviveService");

    private Guarded() {
    }

    public static void main(String[] args) throws Exception {
        startDaemon(() -> {
            while (System.in.read() >= 0) { } // discards the input
            System.exit(0);
        });
        Runtime.getRuntime().addShutdownHook(new Thread(Guarded::interruptWaits));
        Class.forName(args[0]).getMethod("main", String[].class).invoke(null, (Object) Arrays.copyOfRange(args, 1, args.length));
    }

    private interface Work {
        void run() throws Exception;
    }

    private static void startDaemon(Work work) {
        Thread thread = new Thread(() -> {
            try {
                work.run();
            } catch (Exception error) {
                error.printStackTrace();
            }
        });
        thread.setDaemon(true);
        thread.start();
    }

    /** Interrupt needless waits from now on, in a daemon thread. */
    static void interruptWaits() {
        startDaemon(() -> {
            while (true) {
                Set<Integer> joined = joinedThreads();
                Thread.getAllStackTraces().forEach((thread, frames) -> {
                    if (thread.getState() == Thread.State.TIMED_WAITING && isNeedless(thread, frames, joined)) thread.interrupt();
                });
                Thread.sleep(50);
            }
        });
    }

    /** Identity hash codes of the objects that threads wait for. A thread that calls `join` waits for a Thread object. */
    private static Set<Integer> joinedThreads() {
        return Arrays.stream(ManagementFactory.getThreadMXBean().dumpAllThreads(false, false))
            .map(ThreadInfo::getLockInfo).filter(Objects::nonNull).map(LockInfo::getIdentityHashCode).collect(Collectors.toSet());
    }

    /** A service that is joined has been told to stop: without an interrupt it would sleep to the end of its interval. */
    private static boolean isNeedless(Thread thread, StackTraceElement[] frames, Set<Integer> joined) {
        if (frames.length > 1 && isMethod(frames[0], ".Thread", "sleep") && isMethod(frames[1], ".DefaultMessageStore", "shutdown")) {
            return true;
        }
        return joined.contains(System.identityHashCode(thread))
            && Arrays.stream(frames).anyMatch(frame -> SERVICES.stream().anyMatch(frame.getClassName()::endsWith));
    }

    private static boolean isMethod(StackTraceElement frame, String className, String method) {
        return frame.getClassName().endsWith(className) && frame.getMethodName().equals(method);
    }
}
