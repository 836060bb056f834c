import java.nio.charset.StandardCharsets;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * Threads that send messages one after the other, each until a send fails. Prints the body of each acknowledged message as one line,
 * before the thread sends the next one.
 *
 * Arguments: name server, topic, threads, prefix of the bodies.
 */
public final class Flood {
    private Flood() {
    }

    public static void main(String[] args) throws Exception {
        Start.exitOnError();
        int threads = Integer.parseInt(args[2]);
        DefaultMQProducer producer = new DefaultMQProducer("flood");
        producer.setNamesrvAddr(args[0]);
        producer.setRetryTimesWhenSendFailed(0);
        producer.start();
        Start.awaitBroker(producer);
        // The first message alone: it creates the topic.
        producer.send(new Message(args[1], (args[3] + " first").getBytes(StandardCharsets.UTF_8)));
        System.out.println(args[3] + " first");
        AtomicLong next = new AtomicLong();
        CountDownLatch ended = new CountDownLatch(threads);
        for (int i = 0; i < threads; i++) {
            new Thread(() -> {
                while (send(producer, args[1], args[3] + " " + next.getAndIncrement())) { }
                ended.countDown();
            }).start();
        }
        ended.await();
        System.exit(0);
    }

    private static boolean send(DefaultMQProducer producer, String topic, String body) {
        try {
            Message message = new Message(topic, body.getBytes(StandardCharsets.UTF_8));
            if (producer.send(message).getSendStatus() != SendStatus.SEND_OK) return false;
        } catch (Exception error) {
            System.err.println(error); // The broker was killed.
            return false;
        }
        System.out.println(body);
        return true;
    }
}
