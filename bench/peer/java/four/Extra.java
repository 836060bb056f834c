import com.alibaba.fastjson2.JSONObject;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.protocol.heartbeat.MessageModel;

/** What the client 4.9.8 does in another way than 5.5.0, or cannot do. Maven has no tools of its version. */
final class Extra {
    Extra(String nameServer) {
    }

    void connect(String instanceName) {
    }

    void disconnect() {
    }

    Object answer(JSONObject question) {
        throw new IllegalArgumentException("no such question, or not with the client 4.9.8: " + question);
    }

    static void delay(Message message, JSONObject given) {
        for (String name : new String[] {"delay_sec", "delay_ms", "deliver_ms"}) {
            if (given.containsKey(name)) throw new UnsupportedOperationException("the client 4.9.8 has no timers: " + name);
        }
    }

    static String recallHandle(SendResult result) {
        return null;
    }

    static String recall(DefaultMQProducer producer, String topic, String handle) {
        throw new UnsupportedOperationException("the client 4.9.8 cannot recall messages");
    }

    static void broadcast(DefaultMQPushConsumer consumer) {
        consumer.setMessageModel(MessageModel.BROADCASTING);
    }

    static SendResult sendUnchecked(DefaultMQProducer producer, Message message) {
        throw new UnsupportedOperationException("topics of more than 127 characters are sent with the client 5.5.0");
    }
}
