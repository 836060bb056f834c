import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/** A lite pull consumer that polls until "count" messages came or "timeout_ms" has passed, commits if "commit", and leaves. */
final class LitePull {
    private LitePull() {
    }

    static List<JSONObject> pull(String nameServer, String instanceName, JSONObject question) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(question.getString("group"));
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(instanceName);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        consumer.setPollNameServerInterval(Client.INTERVAL_MS);
        consumer.setHeartbeatBrokerInterval(Client.INTERVAL_MS);
        consumer.setPersistConsumerOffsetInterval(Client.INTERVAL_MS);
        if (question.containsKey("sql")) {
            consumer.subscribe(question.getString("topic"), MessageSelector.bySql(question.getString("sql")));
        } else {
            consumer.subscribe(question.getString("topic"), question.containsKey("tags") ? question.getString("tags") : "*");
        }
        consumer.start();
        try {
            return poll(consumer, question);
        } finally {
            consumer.shutdown();
        }
    }

    private static List<JSONObject> poll(DefaultLitePullConsumer consumer, JSONObject question) {
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(question.getLongValue("timeout_ms"));
        List<JSONObject> shown = new ArrayList<>();
        while (shown.size() < question.getIntValue("count") && System.nanoTime() < deadline) {
            for (MessageExt message : consumer.poll(200)) shown.add(Show.of(message));
        }
        if (question.getBooleanValue("commit")) consumer.commitSync();
        return shown;
    }
}
