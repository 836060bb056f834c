import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Reads whole topics, queue by queue, without a group's offsets. */
final class Reader {
    private final DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("peer-reader");

    Reader(String nameServer, String instanceName) throws Exception {
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(instanceName);
        consumer.start();
    }

    void shutdown() {
        consumer.shutdown();
    }

    /** All messages of a topic, once there are "count" of them, "until" is a body among them, or "timeout_ms" has passed. */
    List<JSONObject> read(JSONObject question) throws Exception {
        String topic = question.getString("topic");
        int count = question.getIntValue("count", 0);
        String until = question.getString("until");
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(question.getLongValue("timeout_ms", 0));
        while (true) {
            List<JSONObject> messages = readNow(topic);
            boolean isThere = until == null || messages.stream().anyMatch(message -> until.equals(message.getString("body")));
            if ((messages.size() >= count && isThere) || System.nanoTime() >= deadline) return messages;
            Thread.sleep(50);
        }
    }

    /** The queues of a topic; none while the name server does not know it, such as before its first message. */
    private List<MessageQueue> queues(String topic) {
        try {
            List<MessageQueue> queues = new ArrayList<>(consumer.fetchSubscribeMessageQueues(topic));
            queues.sort(Comparator.naturalOrder());
            return queues;
        } catch (MQClientException error) {
            return List.of();
        }
    }

    private List<JSONObject> readNow(String topic) throws Exception {
        List<JSONObject> shown = new ArrayList<>();
        for (MessageQueue queue : queues(topic)) {
            long at = consumer.minOffset(queue);
            long end = consumer.maxOffset(queue);
            while (at < end) {
                PullResult result;
                try {
                    result = consumer.pull(queue, "*", at, 32);
                } catch (Exception error) {
                    throw new IllegalStateException("at queue offset " + at + " of " + queue + " up to " + end, error);
                }
                List<MessageExt> found = result.getMsgFoundList();
                at = Math.max(result.getNextBeginOffset(), at + (found == null ? 1 : 0));
                if (found != null) found.forEach(message -> shown.add(Show.of(message)));
            }
        }
        return shown;
    }
}
