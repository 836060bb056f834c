import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.function.Predicate;

/** What happened, in order; others wait until it is so many things. */
final class Record {
    private final List<JSONObject> events = new ArrayList<>();

    synchronized void add(JSONObject event) {
        events.add(event);
        notifyAll();
    }

    /** The events that are wanted, once there are so many of them or the time has passed. */
    synchronized List<JSONObject> await(Predicate<JSONObject> isWanted, int count, long timeoutMs) throws InterruptedException {
        long deadline = System.nanoTime() + timeoutMs * 1_000_000;
        while (true) {
            List<JSONObject> wanted = new ArrayList<>(events);
            wanted.removeIf(isWanted.negate());
            long leftMs = (deadline - System.nanoTime()) / 1_000_000;
            if (wanted.size() >= count || leftMs <= 0) return wanted;
            wait(leftMs);
        }
    }
}
