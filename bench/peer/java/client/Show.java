import com.alibaba.fastjson2.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.MessageExt;

/** What the client knows of messages and results, as JSON. Bodies travel as Base64. */
final class Show {
    private Show() {
    }

    static byte[] body(JSONObject given) {
        return Base64.getDecoder().decode(given.getString("body"));
    }

    static String body(byte[] body) {
        return Base64.getEncoder().encodeToString(body);
    }

    static String text(byte[] body) {
        return new String(body, StandardCharsets.UTF_8);
    }

    static JSONObject of(SendResult result) {
        JSONObject shown = new JSONObject();
        shown.put("status", result.getSendStatus().name());
        shown.put("msg_id", result.getMsgId());
        shown.put("offset_msg_id", result.getOffsetMsgId());
        shown.put("queue_id", result.getMessageQueue().getQueueId());
        shown.put("queue_offset", result.getQueueOffset());
        shown.put("recall_handle", Extra.recallHandle(result));
        return shown;
    }

    static JSONObject of(MessageExt message) {
        if (message == null) return null;
        JSONObject shown = new JSONObject();
        shown.put("topic", message.getTopic());
        shown.put("queue_id", message.getQueueId());
        shown.put("queue_offset", message.getQueueOffset());
        shown.put("physical_offset", message.getCommitLogOffset());
        shown.put("msg_id", message.getMsgId());
        shown.put("keys", message.getKeys());
        shown.put("tags", message.getTags());
        shown.put("flag", message.getFlag());
        shown.put("store_size", message.getStoreSize());
        shown.put("sys_flag", message.getSysFlag());
        shown.put("born_timestamp", message.getBornTimestamp());
        shown.put("store_timestamp", message.getStoreTimestamp());
        shown.put("reconsume_times", message.getReconsumeTimes());
        shown.put("body", body(message.getBody()));
        shown.put("properties", message.getProperties());
        return shown;
    }
}
