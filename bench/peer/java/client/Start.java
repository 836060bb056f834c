import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;

/** What each program of ours does before its first send. */
final class Start {
    private static final int PATIENCE = 600;

    private Start() {
    }

    /** An error in any thread ends the program: RocketMQ's own threads would keep it running, with nobody left to work. */
    static void exitOnError() {
        Thread.setDefaultUncaughtExceptionHandler((thread, error) -> {
            error.printStackTrace();
            System.exit(1);
        });
    }

    /** Wait until the broker has told the name server of the topic that new topics are made from, some time after it serves. */
    static void awaitBroker(DefaultMQProducer producer) throws InterruptedException, MQClientException {
        for (int patience = PATIENCE; ; patience--) {
            try {
                producer.fetchPublishMessageQueues("TBW102");
                return;
            } catch (MQClientException error) {
                if (patience == 0) throw error;
                Thread.sleep(50);
            }
        }
    }
}
