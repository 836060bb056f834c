import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;

/** Functions that each program calls before its first send. */
final class Start {
    private static final int ATTEMPTS = 600;

    private Start() {
    }

    /** Exit on an error in any thread: else RocketMQ's own threads would keep the process running. */
    static void exitOnError() {
        Thread.setDefaultUncaughtExceptionHandler((thread, error) -> {
            error.printStackTrace();
            System.exit(1);
        });
    }

    /** Wait until the broker has registered TBW102 with the name server, some time after its start. New topics are created from it. */
    static void awaitBroker(DefaultMQProducer producer) throws InterruptedException, MQClientException {
        for (int attempts = ATTEMPTS; ; attempts--) {
            try {
                producer.fetchPublishMessageQueues("TBW102");
                return;
            } catch (MQClientException error) {
                if (attempts == 0) throw error;
                Thread.sleep(50);
            }
        }
    }
}
