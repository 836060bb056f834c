import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * RocketMQ's own client, driven by lines of JSON (see Lines). Kept running, since a JVM takes a second to start. The same sources
 * run with the client 4.9.8 and with 5.5.0; what differs is in Extra, of which each version has its own.
 *
 * Arguments: the name server's address.
 */
public final class Client {
    /** How often a consumer asks for routes, says that it lives, and tells its offsets. RocketMQ's 30 s are for big clusters. */
    static final int INTERVAL_MS = 1_000;

    private final String nameServer;
    private final Extra extra;
    private final Map<String, Member> members = new ConcurrentHashMap<>();
    private Sender sender;
    private Reader reader;
    private int connections;

    private Client(String nameServer) {
        this.nameServer = nameServer;
        this.extra = new Extra(nameServer);
    }

    public static void main(String[] args) throws Exception {
        Lines.keepOutputForAnswers();
        Lines.serve(new Client(args[0])::answer);
    }

    private Object answer(JSONObject question) throws Exception {
        switch (question.getString("do")) {
            case "connect": return connect();
            case "disconnect": return disconnect();
            case "send": return sender.send(question);
            case "send_batch": return sender.sendBatch(question.getJSONArray("messages"));
            case "request": return sender.request(question);
            case "transaction": return sender.transaction(question);
            case "checks": return sender.checks(question.getIntValue("count"), question.getLongValue("timeout_ms"));
            case "recall": return Extra.recall(sender.producer(), question.getString("topic"), question.getString("handle"));
            case "read": return reader.read(question);
            case "lite_pull": return LitePull.pull(nameServer, instanceName("lite"), question);
            case "by_id": return Show.of(sender.producer().viewMessage(question.getString("topic"), question.getString("id")));
            case "by_key": return byKey(question);
            case "consume": return consume(question);
            case "join": return join(question);
            case "handled": return members.get(question.getString("member")).handled(question);
            case "assigned": return assigned(question);
            case "leave": return leave(question.getString("member"));
            default: return extra.answer(question);
        }
    }

    /** Names of instances are parts of client ids, which must differ between processes too. */
    private String instanceName(String kind) {
        return kind + "-" + ProcessHandle.current().pid() + "-" + ++connections;
    }

    /** Fresh connections for each broker, so that nothing is remembered of an earlier one. */
    private Object connect() throws Exception {
        disconnect();
        String name = instanceName("peer");
        sender = new Sender(nameServer, name);
        reader = new Reader(nameServer, name);
        extra.connect(name);
        return true;
    }

    private Object disconnect() {
        members.values().forEach(Member::close);
        members.clear();
        if (sender != null) {
            sender.shutdown();
            reader.shutdown();
            extra.disconnect();
            sender = null;
        }
        return true;
    }

    private Object byKey(JSONObject question) throws Exception {
        List<JSONObject> shown = new ArrayList<>();
        List<MessageExt> found = sender.producer()
            .queryMessage(question.getString("topic"), question.getString("key"), 64, 0, Long.MAX_VALUE).getMessageList();
        for (MessageExt message : found) shown.add(Show.of(message));
        return shown;
    }

    // --- push consumers -----------------------------------------------------------------------------------------------------

    private Member member(JSONObject question) throws Exception {
        return new Member(nameServer, instanceName("member"), question, sender == null ? null : sender.producer());
    }

    private Object join(JSONObject question) throws Exception {
        String name = "member " + ++connections;
        members.put(name, member(question));
        return name;
    }

    private Object assigned(JSONObject question) throws Exception {
        return members.get(question.getString("member"))
            .assigned(question.getString("topic"), question.getIntValue("count"), question.getLongValue("timeout_ms"));
    }

    private Object leave(String name) {
        members.remove(name).close();
        return true;
    }

    /**
     * Be a member of a group until "count" messages were handled or "timeout_ms" has passed, with "linger" a second more, to see
     * whether more than expected comes. The offsets of what was handled are committed.
     */
    private Object consume(JSONObject question) throws Exception {
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(question.getLongValue("timeout_ms"));
        Member member = member(question);
        try {
            member.handled(question);
            if (question.getBooleanValue("linger")) Thread.sleep(1_000);
            // what was handled last may not count yet, and what was given back may still be on its way
            while (System.nanoTime() < deadline && member.isBusy()) Thread.sleep(10);
            return member.handled(new JSONObject());
        } finally {
            member.close();
        }
    }
}
