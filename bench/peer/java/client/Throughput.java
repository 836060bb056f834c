import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * Measures how many messages per second RocketMQ's client sends synchronously. Prints messages per second, one line per round.
 *
 * Arguments: name server, topic, threads, bytes per body, messages per send (more than 1: a batch), seconds per round, rounds. The
 * first round is a warm-up and is not printed.
 */
public final class Throughput {
    private Throughput() {
    }

    public static void main(String[] args) throws Exception {
        Start.exitOnError();
        String topic = args[1];
        int threads = Integer.parseInt(args[2]);
        int batch = Integer.parseInt(args[4]);
        byte[] body = new byte[Integer.parseInt(args[3])];
        long roundNs = (long) (Double.parseDouble(args[5]) * 1e9);
        DefaultMQProducer producer = new DefaultMQProducer("throughput");
        producer.setNamesrvAddr(args[0]);
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        Start.awaitBroker(producer);
        send(producer, topic, body, batch); // The first message alone: it creates the topic.
        for (int round = 0; round <= Integer.parseInt(args[6]); round++) {
            double rate = round(producer, topic, threads, body, batch, roundNs);
            if (round > 0) System.out.printf("%.1f%n", rate);
        }
        producer.shutdown();
        System.exit(0);
    }

    private static double round(DefaultMQProducer producer, String topic, int threads, byte[] body, int batch, long roundNs)
        throws InterruptedException {
        AtomicLong sent = new AtomicLong();
        CountDownLatch ended = new CountDownLatch(threads);
        long start = System.nanoTime();
        for (int i = 0; i < threads; i++) {
            Thread sender = new Thread(() -> {
                try {
                    while (System.nanoTime() - start < roundNs) {
                        send(producer, topic, body, batch);
                        sent.addAndGet(batch);
                    }
                } catch (Exception error) {
                    error.printStackTrace();
                    System.exit(1);
                } finally {
                    ended.countDown();
                }
            });
            sender.start();
        }
        ended.await();
        return sent.get() * 1e9 / (System.nanoTime() - start);
    }

    private static void send(DefaultMQProducer producer, String topic, byte[] body, int batch) throws Exception {
        SendStatus status;
        if (batch == 1) {
            status = producer.send(new Message(topic, body)).getSendStatus();
        } else {
            List<Message> messages = new ArrayList<>(batch);
            for (int i = 0; i < batch; i++) messages.add(new Message(topic, body));
            status = producer.send(messages).getSendStatus();
        }
        if (status != SendStatus.SEND_OK) throw new IllegalStateException("not sent: " + status);
    }
}
