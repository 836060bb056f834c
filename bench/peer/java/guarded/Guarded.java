import java.lang.management.LockInfo;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadInfo;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.stream.Collectors;

/**
 * Runs another main class in a process that ends with its parent: it exits when standard input is closed.
 *
 * RocketMQ waits several times without need when it shuts down: for threads that only sleep, and for fixed times. Interrupts end
 * these waits. Otherwise the shutdown is RocketMQ's own.
 *
 * Arguments: the class, then its own arguments.
 */
public final class Guarded {
    /** Services that may be interrupted. Threads of the store are not among them: an interrupt would close their files. */
    private static final List<String> SERVICES = List.of("$NettyEventExecutor", ".PopBufferMergeService", ".PopReviveService");

    /** Methods that sleep for a fixed time: 3 s until the store is closed, 10 s until a client applies reset offsets. */
    private static final List<String> SLEEPING = List.of(".DefaultMessageStore.shutdown", ".MQClientInstance.resetOffset");

    private Guarded() {
    }

    public static void main(String[] args) throws Exception {
        startDaemon(() -> {
            while (System.in.read() >= 0) { } // discards the input
            System.exit(0);
        });
        Runtime.getRuntime().addShutdownHook(new Thread(() -> interruptWaits(20)));
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

    /** Interrupt needless waits from now on, in a daemon thread. Each look at all threads takes a millisecond or two. */
    static void interruptWaits(long intervalMs) {
        startDaemon(() -> {
            while (true) {
                Set<Integer> joined = joinedThreads();
                for (Map.Entry<Thread, StackTraceElement[]> entry : Thread.getAllStackTraces().entrySet()) {
                    Thread thread = entry.getKey();
                    List<StackTraceElement> frames = List.of(entry.getValue());
                    if (isSleeping(frames)) thread.interrupt();
                    if (isService(frames) && joined.contains(System.identityHashCode(thread))) end(thread);
                }
                Thread.sleep(intervalMs);
            }
        });
    }

    /** Interrupt a service that has been told to stop. PopReviveService sleeps 40 times for 0.1 s before it stops. */
    private static void end(Thread service) throws InterruptedException {
        for (int i = 0; i < 200 && service.isAlive(); i++) {
            if (service.getState() == Thread.State.TIMED_WAITING) service.interrupt();
            Thread.sleep(1);
        }
    }

    /** Identity hash codes of the objects that threads wait for. A thread that calls `join` waits for a Thread object. */
    private static Set<Integer> joinedThreads() {
        return Arrays.stream(ManagementFactory.getThreadMXBean().dumpAllThreads(false, false))
            .map(ThreadInfo::getLockInfo).filter(Objects::nonNull).map(LockInfo::getIdentityHashCode).collect(Collectors.toSet());
    }

    private static boolean isService(List<StackTraceElement> frames) {
        return frames.stream().anyMatch(frame -> SERVICES.stream().anyMatch(frame.getClassName()::endsWith));
    }

    private static boolean isSleeping(List<StackTraceElement> frames) {
        if (frames.isEmpty() || !frames.get(0).getMethodName().equals("sleep")) return false;
        return frames.stream().map(frame -> frame.getClassName() + "." + frame.getMethodName())
            .dropWhile(name -> name.endsWith(".sleep")).limit(1).anyMatch(name -> SLEEPING.stream().anyMatch(name::endsWith));
    }
}
