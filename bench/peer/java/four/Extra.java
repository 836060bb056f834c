import com.alibaba.fastjson2.JSONObject;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.protocol.heartbeat.MessageModel;

/** Differences of the client 4.9.8 from 5.5.0. Maven has no tools of this version. */
final class Extra {
    Extra(String nameServer) {
        Guarded.interruptWaits(250);
    }

    void connect(String instanceName) {
    }

    void disconnect() {
    }

    Object run(JSONObject command) {
        throw new IllegalArgumentException("unknown command, or not supported by the client 4.9.8: " + command);
    }

    static void delay(Message message, JSONObject fields) {
        for (String name : new String[] {"delay_sec", "delay_ms", "deliver_ms"}) {
            if (fields.containsKey(name)) throw new UnsupportedOperationException("the client 4.9.8 has no timers: " + name);
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

    static void pop(DefaultMQPushConsumer consumer, long invisibleMs) {
        throw new UnsupportedOperationException("the client 4.9.8 cannot pop");
    }

    static SendResult sendUnchecked(DefaultMQProducer producer, Message message) {
        throw new UnsupportedOperationException("topics of more than 127 characters are sent with the client 5.5.0");
    }
}
