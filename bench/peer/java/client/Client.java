import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * RocketMQ's client, controlled by lines of JSON (see CommandLoop). One JVM serves many tests, because a start takes a second. The
 * same sources run with the clients 4.9.8 and 5.5.0. The differences are in Extra: each version has its own.
 *
 * Arguments: the address of the name server.
 */
public final class Client {
    /** Interval at which a consumer requests routes, sends heartbeats and commits offsets. RocketMQ's 30 s are for big clusters. */
    static final int INTERVAL_MS = 1_000;
    /** For requests other than sends. After its default of 3 s, the client also closes the connection, and other requests on it fail. */
    static final int API_TIMEOUT_MS = 30_000;

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
        CommandLoop.reserveOutput();
        CommandLoop.serve(new Client(args[0])::run);
    }

    private Object run(JSONObject command) throws Exception {
        switch (command.getString("command")) {
            case "connect": return connect();
            case "disconnect": return disconnect();
            case "send": return sender.send(command);
            case "send_batch": return sender.sendBatch(command.getJSONArray("messages"));
            case "request": return sender.request(command);
            case "transaction": return sender.transaction(command);
            case "checks": return sender.checks(command.getIntValue("count"), command.getLongValue("timeout_ms"));
            case "recall": return Extra.recall(sender.producer(), command.getString("topic"), command.getString("handle"));
            case "read": return reader.read(command);
            case "lite_pull": return LitePull.pull(nameServer, instanceName("lite"), command);
            case "by_id": return Json.of(sender.producer().viewMessage(command.getString("topic"), command.getString("id")));
            case "by_key": return byKey(command);
            case "consume": return consume(command);
            case "join": return join(command);
            case "handled": return members.get(command.getString("member")).handled(command);
            case "assigned": return assigned(command);
            case "leave": return leave(command.getString("member"));
            default: return extra.run(command);
        }
    }

    /** An instance name is part of the client ID, which must be unique over all processes. */
    private String instanceName(String kind) {
        return kind + "-" + ProcessHandle.current().pid() + "-" + ++connections;
    }

    /** Use new connections for each broker, so that no state of the previous broker remains. */
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

    private Object byKey(JSONObject command) throws Exception {
        List<JSONObject> json = new ArrayList<>();
        List<MessageExt> found = sender.producer()
            .queryMessage(command.getString("topic"), command.getString("key"), 64, 0, Long.MAX_VALUE).getMessageList();
        for (MessageExt message : found) json.add(Json.of(message));
        return json;
    }

    // --- push consumers -----------------------------------------------------------------------------------------------------

    private Member member(JSONObject command) throws Exception {
        return new Member(nameServer, instanceName("member"), command, sender == null ? null : sender.producer());
    }

    private Object join(JSONObject command) throws Exception {
        String name = "member " + ++connections;
        members.put(name, member(command));
        return name;
    }

    private Object assigned(JSONObject command) throws Exception {
        return members.get(command.getString("member"))
            .assigned(command.getString("topic"), command.getIntValue("count"), command.getLongValue("timeout_ms"));
    }

    private Object leave(String name) {
        members.remove(name).close();
        return true;
    }

    /**
     * Be a member of a group until "count" messages were handled or "timeout_ms" has passed. With "linger", stay one more second, to
     * detect unexpected messages. Commit the offsets of the handled messages.
     */
    private Object consume(JSONObject command) throws Exception {
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(command.getLongValue("timeout_ms"));
        Member member = member(command);
        try {
            member.handled(command);
            if (command.getBooleanValue("linger")) Thread.sleep(1_000);
            // The last handled messages may not be counted yet, and messages that were sent back may be under way.
            while (System.nanoTime() < deadline && member.isBusy()) Thread.sleep(10);
            return member.handled(new JSONObject());
        } finally {
            member.close();
        }
    }
}
