import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * A producer or a consumer with the default settings of RocketMQ's client, for bench/cluster_faults.py. It prints a line for each
 * event; bench/peer/fault_client.py describes them.
 *
 * Arguments: "producer", name servers, prefix of the topics, pause between two sends of a stream in ms; or "consumer", name servers,
 * prefix of the topics and groups.
 */
public final class Faults {
    private static final int KEYS = 8;

    private Faults() {
    }

    public static void main(String[] args) throws Exception {
        Start.exitOnError();
        if (args[0].equals("producer")) produce(args[1], args[2], Integer.parseInt(args[3]));
        else consume(args[1], args[2]);
        System.out.println("ready");
        Thread.sleep(Long.MAX_VALUE);
    }

    private static synchronized void print(String line) {
        System.out.println(line);
    }

    private static void produce(String nameServer, String prefix, int pauseMs) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(prefix + "-producers");
        producer.setNamesrvAddr(nameServer);
        producer.start();
        AtomicInteger next = new AtomicInteger();
        stream("plain", pauseMs, number -> {
            String id = "plain/" + number;
            long start = System.currentTimeMillis();
            try {
                sent(id, start, producer.send(message(prefix + "-plain", id)));
            } catch (Exception error) {
                failed(id, start, error);
            }
        });
        stream("async", pauseMs, number -> {
            String id = "async/" + number;
            long start = System.currentTimeMillis();
            try {
                producer.send(message(prefix + "-plain", id), new SendCallback() {
                    @Override
                    public void onSuccess(SendResult result) {
                        sent(id, start, result);
                    }

                    @Override
                    public void onException(Throwable error) {
                        failed(id, start, error);
                    }
                });
            } catch (Exception error) {
                failed(id, start, error);
            }
        });
        stream("keys", pauseMs, number -> {
            String key = "k" + number % KEYS, id = "keys/" + key + "/" + next.getAndIncrement();
            long start = System.currentTimeMillis();
            try {
                sent(id, start, producer.send(message(prefix + "-keys", id), new SelectMessageQueueByHash(), key));
            } catch (Exception error) {
                failed(id, start, error);
            }
        });
    }

    private interface Send {
        void run(int number);
    }

    private static void stream(String name, int pauseMs, Send send) {
        new Thread(() -> {
            try {
                for (int number = 0; ; number++) {
                    send.run(number);
                    Thread.sleep(pauseMs);
                }
            } catch (InterruptedException error) {
                throw new IllegalStateException(error);
            }
        }, name).start();
    }

    private static Message message(String topic, String id) {
        return new Message(topic, id.getBytes(StandardCharsets.UTF_8));
    }

    private static void sent(String id, long start, SendResult result) {
        boolean ok = result.getSendStatus() == SendStatus.SEND_OK;
        print((ok ? "ok " : "fail ") + System.currentTimeMillis() + " " + start + " " + id);
    }

    private static void failed(String id, long start, Throwable error) {
        System.err.println(id + " " + error);
        print("fail " + System.currentTimeMillis() + " " + start + " " + id);
    }

    private static void consume(String nameServer, String prefix) throws Exception {
        DefaultMQPushConsumer plain = consumer(nameServer, prefix + "-plain");
        plain.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            got(messages);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        plain.start();
        DefaultMQPushConsumer keys = consumer(nameServer, prefix + "-keys");
        keys.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            got(messages);
            return ConsumeOrderlyStatus.SUCCESS;
        });
        keys.start();
    }

    private static DefaultMQPushConsumer consumer(String nameServer, String topic) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(topic + "-group");
        consumer.setNamesrvAddr(nameServer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        return consumer;
    }

    private static void got(List<MessageExt> messages) {
        for (MessageExt message : messages) {
            print("got " + System.currentTimeMillis() + " " + message.getBrokerName() + "/" + message.getQueueId() + " "
                + new String(message.getBody(), StandardCharsets.UTF_8));
        }
    }
}
