import com.alibaba.fastjson2.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.MessageExt;

/** Converts messages and results to JSON. A body is Base64. */
final class Json {
    private Json() {
    }

    static byte[] body(JSONObject fields) {
        return Base64.getDecoder().decode(fields.getString("body"));
    }

    static String body(byte[] body) {
        return Base64.getEncoder().encodeToString(body);
    }

    static String text(byte[] body) {
        return new String(body, StandardCharsets.UTF_8);
    }

    static JSONObject of(SendResult result) {
        JSONObject json = new JSONObject();
        json.put("status", result.getSendStatus().name());
        json.put("msg_id", result.getMsgId());
        json.put("offset_msg_id", result.getOffsetMsgId());
        json.put("queue_id", result.getMessageQueue().getQueueId());
        json.put("queue_offset", result.getQueueOffset());
        json.put("recall_handle", Extra.recallHandle(result));
        return json;
    }

    static JSONObject of(MessageExt message) {
        if (message == null) return null;
        JSONObject json = new JSONObject();
        json.put("topic", message.getTopic());
        json.put("queue_id", message.getQueueId());
        json.put("queue_offset", message.getQueueOffset());
        json.put("physical_offset", message.getCommitLogOffset());
        json.put("msg_id", message.getMsgId());
        json.put("keys", message.getKeys());
        json.put("tags", message.getTags());
        json.put("flag", message.getFlag());
        json.put("store_size", message.getStoreSize());
        json.put("sys_flag", message.getSysFlag());
        json.put("born_timestamp", message.getBornTimestamp());
        json.put("store_timestamp", message.getStoreTimestamp());
        json.put("reconsume_times", message.getReconsumeTimes());
        json.put("body", body(message.getBody()));
        json.put("properties", message.getProperties());
        return json;
    }
}
