import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.function.Predicate;

/** Events in order. Other threads can wait for a number of them. */
final class EventLog {
    private final List<JSONObject> events = new ArrayList<>();

    synchronized void add(JSONObject event) {
        events.add(event);
        notifyAll();
    }

    /** Return the matching events when there are `count` of them, or after the timeout. */
    synchronized List<JSONObject> await(Predicate<JSONObject> matches, int count, long timeoutMs) throws InterruptedException {
        long deadline = System.nanoTime() + timeoutMs * 1_000_000;
        while (true) {
            List<JSONObject> found = new ArrayList<>(events);
            found.removeIf(matches.negate());
            long leftMs = (deadline - System.nanoTime()) / 1_000_000;
            if (found.size() >= count || leftMs <= 0) return found;
            wait(leftMs);
        }
    }
}
