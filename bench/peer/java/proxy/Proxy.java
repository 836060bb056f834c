import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.netty.shaded.io.netty.channel.nio.NioEventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.socket.nio.NioServerSocketChannel;
import java.lang.reflect.Field;
import java.net.InetSocketAddress;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.common.utils.StartAndShutdown;
import org.apache.rocketmq.proxy.ProxyStartup;
import org.apache.rocketmq.proxy.config.ConfigurationManager;
import org.apache.rocketmq.proxy.config.ProxyConfig;
import org.apache.rocketmq.proxy.grpc.ProxyAndTlsProtocolNegotiator;
import org.apache.rocketmq.proxy.grpc.interceptor.ContextInterceptor;
import org.apache.rocketmq.proxy.grpc.interceptor.GlobalExceptionInterceptor;
import org.apache.rocketmq.proxy.grpc.interceptor.HeaderInterceptor;
import org.apache.rocketmq.proxy.grpc.v2.GrpcMessagingApplication;
import org.apache.rocketmq.proxy.processor.MessagingProcessor;

/**
 * RocketMQ's proxy with its gRPC service on loopback. RocketMQ's main class always listens on all addresses. The threads and limits are
 * the same as there. With a certificate in its configuration it accepts TLS and plain text on its port, as RocketMQ's main class does,
 * and otherwise plain text only.
 *
 * Arguments: as for RocketMQ's main class.
 */
public final class Proxy extends ProxyStartup {
    private Proxy() {
    }

    public static void main(String[] args) {
        try {
            start(args);
        } catch (Exception error) {
            error.printStackTrace();
            System.exit(1); // Some threads of the proxy already run.
        }
        System.out.println("proxy started");
    }

    private static void start(String[] args) throws Exception {
        initConfiguration(parseCommandLineArgument(args));
        initThreadPoolMonitor();
        ThreadPoolExecutor executor = createServerExecutor();
        MessagingProcessor processor = createMessagingProcessor();
        GrpcMessagingApplication application = GrpcMessagingApplication.create(processor);
        startParts();
        application.start();
        listen(application, executor, ConfigurationManager.getProxyConfig());
    }

    /** Start the parts that the creation of the processor has collected: in local mode the broker is one of them. */
    private static void startParts() throws Exception {
        Field parts = ProxyStartup.class.getDeclaredField("PROXY_START_AND_SHUTDOWN");
        parts.setAccessible(true);
        ((StartAndShutdown) parts.get(null)).start();
    }

    private static void listen(GrpcMessagingApplication application, ThreadPoolExecutor executor, ProxyConfig config)
        throws Exception {
        NettyServerBuilder builder = NettyServerBuilder.forAddress(new InetSocketAddress("127.0.0.1", config.getGrpcServerPort()));
        if (!config.isTlsTestModeEnable()) builder.protocolNegotiator(new ProxyAndTlsProtocolNegotiator());
        builder.maxConcurrentCallsPerConnection(config.getGrpcMaxConcurrentCallsPerConnection())
            .bossEventLoopGroup(new NioEventLoopGroup(config.getGrpcBossLoopNum()))
            .workerEventLoopGroup(new NioEventLoopGroup(config.getGrpcWorkerLoopNum()))
            .channelType(NioServerSocketChannel.class)
            .executor(executor)
            .maxInboundMessageSize(config.getGrpcMaxInboundMessageSize())
            .maxConnectionIdle(config.getGrpcClientIdleTimeMills(), TimeUnit.MILLISECONDS)
            .addService(application)
            .intercept(new GlobalExceptionInterceptor())
            .intercept(new ContextInterceptor())
            .intercept(new HeaderInterceptor())
            .build()
            .start();
    }
}
