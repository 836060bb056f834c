import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.netty.shaded.io.netty.channel.nio.NioEventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.socket.nio.NioServerSocketChannel;
import java.net.InetSocketAddress;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.proxy.ProxyStartup;
import org.apache.rocketmq.proxy.config.ConfigurationManager;
import org.apache.rocketmq.proxy.config.ProxyConfig;
import org.apache.rocketmq.proxy.grpc.interceptor.ContextInterceptor;
import org.apache.rocketmq.proxy.grpc.interceptor.GlobalExceptionInterceptor;
import org.apache.rocketmq.proxy.grpc.interceptor.HeaderInterceptor;
import org.apache.rocketmq.proxy.grpc.v2.GrpcMessagingApplication;
import org.apache.rocketmq.proxy.processor.MessagingProcessor;

/**
 * RocketMQ's proxy with its gRPC service on loopback, without TLS. RocketMQ's main class always listens on all addresses. The threads
 * and limits are the same as there.
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
        processor.start();
        application.start();
        listen(application, executor, ConfigurationManager.getProxyConfig());
    }

    private static void listen(GrpcMessagingApplication application, ThreadPoolExecutor executor, ProxyConfig config)
        throws Exception {
        NettyServerBuilder.forAddress(new InetSocketAddress("127.0.0.1", config.getGrpcServerPort()))
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
