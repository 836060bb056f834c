import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * Measures how many messages per second RocketMQ's client sends. Prints one line per round: messages per second, p50 and p99 of the
 * time of a send in milliseconds (synchronous sends only, else 0), and the number of messages.
 *
 * Arguments: name server, topic, threads, bytes per body, messages per send (more than 1: a batch), seconds per round, rounds, and
 * optionally "async". The first round is a warm-up and is not printed.
 */
public final class Throughput {
    /** Asynchronous sends of one thread that have no result yet, at most. */
    private static final int WINDOW = 256;

    private Throughput() {
    }

    public static void main(String[] args) throws Exception {
        Start.exitOnError();
        String topic = args[1];
        int threads = Integer.parseInt(args[2]);
        int batch = Integer.parseInt(args[4]);
        byte[] body = new byte[Integer.parseInt(args[3])];
        long roundNs = (long) (Double.parseDouble(args[5]) * 1e9);
        boolean isAsync = args.length > 7 && args[7].equals("async");
        DefaultMQProducer producer = new DefaultMQProducer("throughput");
        producer.setNamesrvAddr(args[0]);
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        Start.awaitBroker(producer);
        send(producer, topic, body, batch); // The first message alone: it creates the topic.
        for (int round = 0; round <= Integer.parseInt(args[6]); round++) {
            String line = round(producer, topic, threads, body, batch, roundNs, isAsync);
            if (round > 0) System.out.println(line);
        }
        producer.shutdown();
        System.exit(0);
    }

    private static String round(
        DefaultMQProducer producer, String topic, int threads, byte[] body, int batch, long roundNs, boolean isAsync)
        throws InterruptedException {
        AtomicLong sent = new AtomicLong();
        List<List<Long>> times = new ArrayList<>();
        CountDownLatch ended = new CountDownLatch(threads);
        long start = System.nanoTime();
        for (int i = 0; i < threads; i++) {
            List<Long> own = new ArrayList<>();
            times.add(own);
            Thread sender = new Thread(() -> {
                try {
                    if (isAsync) {
                        sendAsync(producer, topic, body, start + roundNs, sent);
                    } else {
                        sendSync(producer, topic, body, batch, start + roundNs, sent, own);
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
        double rate = sent.get() * 1e9 / (System.nanoTime() - start);
        long[] sorted = times.stream().flatMap(List::stream).mapToLong(Long::longValue).sorted().toArray();
        return String.format("%.1f %.3f %.3f %d", rate, percentile(sorted, 0.5), percentile(sorted, 0.99), sent.get());
    }

    private static double percentile(long[] sortedNs, double share) {
        return sortedNs.length == 0 ? 0 : sortedNs[(int) (share * (sortedNs.length - 1))] / 1e6;
    }

    private static void sendSync(
        DefaultMQProducer producer, String topic, byte[] body, int batch, long end, AtomicLong sent, List<Long> timesNs)
        throws Exception {
        for (long before = System.nanoTime(); before < end; ) {
            send(producer, topic, body, batch);
            long now = System.nanoTime();
            timesNs.add(now - before);
            sent.addAndGet(batch);
            before = now;
        }
    }

    private static void sendAsync(DefaultMQProducer producer, String topic, byte[] body, long end, AtomicLong sent) throws Exception {
        Semaphore window = new Semaphore(WINDOW);
        while (System.nanoTime() < end) {
            window.acquire();
            producer.send(new Message(topic, body), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    sent.incrementAndGet();
                    window.release();
                }

                @Override
                public void onException(Throwable error) {
                    error.printStackTrace();
                    System.exit(1);
                }
            });
        }
        window.acquire(WINDOW);
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
