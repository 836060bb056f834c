import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/** A lite pull consumer: polls until "count" messages arrived or "timeout_ms" has passed, commits if "commit" is set, and closes. */
final class LitePull {
    private LitePull() {
    }

    static List<JSONObject> pull(String nameServer, String instanceName, JSONObject command) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(command.getString("group"));
        consumer.setNamesrvAddr(nameServer);
        consumer.setInstanceName(instanceName);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        consumer.setMqClientApiTimeout(Client.API_TIMEOUT_MS);
        consumer.setPollNameServerInterval(Client.INTERVAL_MS);
        consumer.setHeartbeatBrokerInterval(Client.INTERVAL_MS);
        consumer.setPersistConsumerOffsetInterval(Client.INTERVAL_MS);
        if (command.containsKey("sql")) {
            consumer.subscribe(command.getString("topic"), MessageSelector.bySql(command.getString("sql")));
        } else {
            consumer.subscribe(command.getString("topic"), command.containsKey("tags") ? command.getString("tags") : "*");
        }
        consumer.start();
        try {
            return poll(consumer, command);
        } finally {
            consumer.shutdown();
        }
    }

    private static List<JSONObject> poll(DefaultLitePullConsumer consumer, JSONObject command) {
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(command.getLongValue("timeout_ms"));
        List<JSONObject> json = new ArrayList<>();
        while (json.size() < command.getIntValue("count") && System.nanoTime() < deadline) {
            for (MessageExt message : consumer.poll(200)) json.add(Json.of(message));
        }
        if (command.getBooleanValue("commit")) consumer.commitSync();
        return json;
    }
}
