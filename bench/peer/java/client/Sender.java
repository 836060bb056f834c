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

/** One producer in its forms: synchronous, asynchronous, one-way, in batches, in order, in transactions, with an answer. */
final class Sender implements TransactionListener {
    private static final long PATIENCE_MS = 10_000;
    private final TransactionMQProducer producer;
    private final Map<String, JSONArray> checkStates = new ConcurrentHashMap<>();
    private final Record checks = new Record();

    Sender(String nameServer, String instanceName) throws Exception {
        producer = new TransactionMQProducer("producer-" + instanceName); // of its own, or others would be asked about transactions
        producer.setNamesrvAddr(nameServer);
        producer.setInstanceName(instanceName);
        producer.setSendMsgTimeout((int) PATIENCE_MS);
        producer.setTransactionListener(this);
        producer.start();
    }

    DefaultMQProducer producer() {
        return producer;
    }

    void shutdown() {
        producer.shutdown();
    }

    static Message message(JSONObject given) {
        Message message = new Message(given.getString("topic"), Show.body(given));
        if (given.containsKey("tags")) message.setTags(given.getString("tags"));
        if (given.containsKey("keys")) message.setKeys(given.getString("keys"));
        if (given.containsKey("flag")) message.setFlag(given.getIntValue("flag"));
        if (given.containsKey("level")) message.setDelayTimeLevel(given.getIntValue("level"));
        Extra.delay(message, given);
        JSONObject properties = given.getJSONObject("properties");
        if (properties != null) properties.forEach((name, value) -> message.putUserProperty(name, (String) value));
        return message;
    }

    /** One after the other. In "mode" "async" all are under way at once; a message that is sent "oneway" has no result. */
    List<Object> send(JSONObject question) throws Exception {
        JSONArray given = question.getJSONArray("messages");
        String mode = question.getString("mode") == null ? "sync" : question.getString("mode");
        List<CompletableFuture<Object>> results = new ArrayList<>();
        for (int i = 0; i < given.size(); i++) results.add(send(mode, given.getJSONObject(i)));
        List<Object> shown = new ArrayList<>();
        for (CompletableFuture<Object> result : results) shown.add(result.get(PATIENCE_MS, TimeUnit.MILLISECONDS));
        return shown;
    }

    private CompletableFuture<Object> send(String mode, JSONObject given) throws Exception {
        Message message = message(given);
        switch (mode) {
            case "sync": return CompletableFuture.completedFuture(Show.of(sendNow(message, given)));
            case "async": return sendAsync(message);
            case "oneway":
                producer.sendOneway(message);
                return CompletableFuture.completedFuture(null);
            default: throw new IllegalArgumentException("no such mode: " + mode);
        }
    }

    private SendResult sendNow(Message message, JSONObject given) throws Exception {
        if (message.getTopic().length() > 127) return Extra.sendUnchecked(producer, message);
        if (given.containsKey("hash_key")) return producer.send(message, new SelectMessageQueueByHash(), given.getString("hash_key"));
        if (!given.containsKey("queue_id")) return producer.send(message);
        return producer.send(message, (queues, same, id) -> {
            for (MessageQueue queue : queues) if (queue.getQueueId() == (int) id) return queue;
            throw new IllegalArgumentException("no queue " + id + " in " + queues);
        }, given.getInteger("queue_id"));
    }

    private CompletableFuture<Object> sendAsync(Message message) throws Exception {
        CompletableFuture<Object> shown = new CompletableFuture<>();
        producer.send(message, new SendCallback() {
            @Override public void onSuccess(SendResult result) {
                shown.complete(Show.of(result));
            }

            @Override public void onException(Throwable error) {
                shown.completeExceptionally(error);
            }
        });
        return shown;
    }

    JSONObject sendBatch(JSONArray given) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < given.size(); i++) messages.add(message(given.getJSONObject(i)));
        return Show.of(producer.send(messages));
    }

    /** Sends a request, and gives the body and the properties of what was answered. */
    JSONObject request(JSONObject question) throws Exception {
        Message answer = producer.request(message(question.getJSONObject("message")), question.getLongValue("timeout_ms"));
        JSONObject shown = new JSONObject();
        shown.put("body", Show.body(answer.getBody()));
        shown.put("properties", answer.getProperties());
        return shown;
    }

    // --- transactions -------------------------------------------------------------------------------------------------------

    /** "local" is what the local transaction comes to, "checks" what each check is told: "commit", "rollback" or "unknown". */
    JSONObject transaction(JSONObject question) throws Exception {
        Message message = message(question.getJSONObject("message"));
        checkStates.put(Show.body(message.getBody()), question.getJSONArray("checks"));
        TransactionSendResult result = producer.sendMessageInTransaction(message, question.getString("local"));
        JSONObject shown = Show.of(result);
        shown.put("transaction_id", result.getTransactionId());
        shown.put("local_state", result.getLocalTransactionState().name());
        return shown;
    }

    List<JSONObject> checks(int count, long timeoutMs) throws InterruptedException {
        return checks.await(check -> true, count, timeoutMs);
    }

    @Override public LocalTransactionState executeLocalTransaction(Message message, Object local) {
        return state((String) local);
    }

    @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
        JSONArray states = checkStates.get(Show.body(message.getBody()));
        String state = states == null || states.isEmpty() ? "unknown" : (String) (states.size() > 1 ? states.remove(0) : states.get(0));
        JSONObject shown = Show.of(message);
        shown.put("transaction_id", message.getTransactionId());
        shown.put("told", state);
        checks.add(shown);
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
