import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** A producer with all forms of sending: synchronous, asynchronous, one-way, batch, orderly, transaction, request. */
final class Sender implements TransactionListener {
    private static final long TIMEOUT_MS = 10_000;
    private final TransactionMQProducer producer;
    private final Map<String, JSONArray> checkStates = new ConcurrentHashMap<>();
    private final EventLog checks = new EventLog();

    Sender(String nameServer, String instanceName) throws Exception {
        // A group of its own: else the broker would send transaction checks to other producers.
        producer = new TransactionMQProducer("producer-" + instanceName);
        producer.setNamesrvAddr(nameServer);
        producer.setInstanceName(instanceName);
        producer.setSendMsgTimeout((int) TIMEOUT_MS);
        producer.setMqClientApiTimeout(Client.API_TIMEOUT_MS);
        producer.setTransactionListener(this);
        producer.start();
    }

    DefaultMQProducer producer() {
        return producer;
    }

    void shutdown() {
        producer.shutdown();
    }

    static Message message(JSONObject fields) {
        Message message = new Message(fields.getString("topic"), Json.body(fields));
        if (fields.containsKey("tags")) message.setTags(fields.getString("tags"));
        if (fields.containsKey("keys")) message.setKeys(fields.getString("keys"));
        if (fields.containsKey("flag")) message.setFlag(fields.getIntValue("flag"));
        if (fields.containsKey("level")) message.setDelayTimeLevel(fields.getIntValue("level"));
        Extra.delay(message, fields);
        JSONObject properties = fields.getJSONObject("properties");
        if (properties != null) properties.forEach((name, value) -> message.putUserProperty(name, (String) value));
        return message;
    }

    /** Send messages one after the other. With "mode" "async", do not wait between them. With "oneway", the results are null. */
    List<Object> send(JSONObject command) throws Exception {
        JSONArray messages = command.getJSONArray("messages");
        String mode = command.getString("mode") == null ? "sync" : command.getString("mode");
        List<CompletableFuture<Object>> results = new ArrayList<>();
        for (int i = 0; i < messages.size(); i++) results.add(send(mode, messages.getJSONObject(i)));
        List<Object> json = new ArrayList<>();
        for (CompletableFuture<Object> result : results) json.add(result.get(TIMEOUT_MS, TimeUnit.MILLISECONDS));
        return json;
    }

    private CompletableFuture<Object> send(String mode, JSONObject fields) throws Exception {
        Message message = message(fields);
        switch (mode) {
            case "sync": return CompletableFuture.completedFuture(Json.of(sendNow(message, fields)));
            case "async": return sendAsync(message);
            case "oneway":
                producer.sendOneway(message);
                return CompletableFuture.completedFuture(null);
            default: throw new IllegalArgumentException("no such mode: " + mode);
        }
    }

    private SendResult sendNow(Message message, JSONObject fields) throws Exception {
        if (message.getTopic().length() > 127) return Extra.sendUnchecked(producer, message);
        if (fields.containsKey("hash_key")) return producer.send(message, new SelectMessageQueueByHash(), fields.getString("hash_key"));
        if (!fields.containsKey("queue_id")) return producer.send(message);
        return producer.send(message, (queues, same, id) -> {
            for (MessageQueue queue : queues) if (queue.getQueueId() == (int) id) return queue;
            throw new IllegalArgumentException("no queue " + id + " in " + queues);
        }, fields.getInteger("queue_id"));
    }

    private CompletableFuture<Object> sendAsync(Message message) throws Exception {
        CompletableFuture<Object> json = new CompletableFuture<>();
        producer.send(message, new SendCallback() {
            @Override public void onSuccess(SendResult result) {
                json.complete(Json.of(result));
            }

            @Override public void onException(Throwable error) {
                json.completeExceptionally(error);
            }
        });
        return json;
    }

    JSONObject sendBatch(JSONArray batch) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < batch.size(); i++) messages.add(message(batch.getJSONObject(i)));
        return Json.of(producer.send(messages));
    }

    /** Send a request, and return the body and the properties of the reply. */
    JSONObject request(JSONObject command) throws Exception {
        Message reply = producer.request(message(command.getJSONObject("message")), command.getLongValue("timeout_ms"));
        JSONObject json = new JSONObject();
        json.put("body", Json.body(reply.getBody()));
        json.put("properties", reply.getProperties());
        return json;
    }

    // --- transactions -------------------------------------------------------------------------------------------------------

    /** "local" is the state of the local transaction, "checks" the state for each check: "commit", "rollback" or "unknown". */
    JSONObject transaction(JSONObject command) throws Exception {
        Message message = message(command.getJSONObject("message"));
        checkStates.put(Json.body(message.getBody()), command.getJSONArray("checks"));
        TransactionSendResult result = producer.sendMessageInTransaction(message, command.getString("local"));
        JSONObject json = Json.of(result);
        json.put("transaction_id", result.getTransactionId());
        json.put("local_state", result.getLocalTransactionState().name());
        return json;
    }

    List<JSONObject> checks(int count, long timeoutMs) throws InterruptedException {
        return checks.await(check -> true, count, timeoutMs);
    }

    @Override public LocalTransactionState executeLocalTransaction(Message message, Object local) {
        return state((String) local);
    }

    @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
        JSONArray states = checkStates.get(Json.body(message.getBody()));
        String state = states == null || states.isEmpty() ? "unknown" : (String) (states.size() > 1 ? states.remove(0) : states.get(0));
        JSONObject json = Json.of(message);
        json.put("transaction_id", message.getTransactionId());
        json.put("state", state);
        checks.add(json);
        return state(state);
    }

    private static LocalTransactionState state(String name) {
        switch (name) {
            case "commit": return LocalTransactionState.COMMIT_MESSAGE;
            case "rollback": return LocalTransactionState.ROLLBACK_MESSAGE;
            default: return LocalTransactionState.UNKNOW;
        }
    }
}
