import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/** Fills a topic. Arguments: name server, topic, number of messages, messages per batch, bytes per body. */
public final class Fill {
    private Fill() {
    }

    public static void main(String[] args) throws Exception {
        Start.exitOnError();
        int count = Integer.parseInt(args[2]);
        int batch = Integer.parseInt(args[3]);
        byte[] body = new byte[Integer.parseInt(args[4])];
        DefaultMQProducer producer = new DefaultMQProducer("fill");
        producer.setNamesrvAddr(args[0]);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        Start.awaitBroker(producer);
        for (int sent = 0; sent < count; sent += batch) {
            List<Message> messages = new ArrayList<>(batch);
            for (int i = 0; i < Math.min(batch, count - sent); i++) messages.add(new Message(args[1], body));
            SendStatus status = producer.send(messages).getSendStatus();
            if (status != SendStatus.SEND_OK) throw new IllegalStateException("not sent: " + status);
        }
        System.exit(0);
    }
}
