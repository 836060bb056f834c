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

/** Reads whole topics, queue by queue, without the offsets of a group. */
final class Reader {
    private final DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("peer-reader");

    Reader(String nameServer, String instanceName) throws Exception {
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(instanceName);
        consumer.setMqClientApiTimeout(Client.API_TIMEOUT_MS);
        consumer.start();
    }

    void shutdown() {
        consumer.shutdown();
    }

    /** Return all messages of a topic when there are "count" of them and one has the body "until", or after "timeout_ms". */
    List<JSONObject> read(JSONObject command) throws Exception {
        String topic = command.getString("topic");
        int count = command.getIntValue("count", 0);
        String until = command.getString("until");
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(command.getLongValue("timeout_ms", 0));
        while (true) {
            List<JSONObject> messages = readNow(topic);
            boolean isComplete = until == null || messages.stream().anyMatch(message -> until.equals(message.getString("body")));
            if ((messages.size() >= count && isComplete) || System.nanoTime() >= deadline) return messages;
            Thread.sleep(50);
        }
    }

    /** Return the queues of a topic: none while the name server has no route, such as before the first message. */
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
        List<JSONObject> json = new ArrayList<>();
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
                if (found != null) found.forEach(message -> json.add(Json.of(message)));
            }
        }
        return json;
    }
}
