//! A program with the client rocketmq-client-rust. tests/conformance/client_programs.py describes what each such program does.
#![recursion_limit = "512"]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rocketmq_client_rust::{
    AclClientRPCHook, ClientError, ClientResult, ClientRuntime, ClientRuntimeConfig,
    ConsumeConcurrentlyContext, ConsumeConcurrentlyStatus, ConsumeOrderlyContext,
    ConsumeOrderlyStatus, DefaultLitePullConsumer, DefaultMQProducer, DefaultMQPushConsumer,
    MQPushConsumer, MessageQueueSelector, SelectMessageQueueByHash, SendResult, SessionCredentials,
};
use rocketmq_model::common::consumer::consume_from_where::ConsumeFromWhere;
use rocketmq_model::common::message::message_ext::MessageExt;
use rocketmq_model::common::message::message_single::Message;
use rocketmq_model::common::message::MessageTrait;
use rocketmq_observability::TelemetryRuntimeGuard;
use rocketmq_runtime::RuntimeOwner;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc;

const PULLED: usize = 16;
const MAXIMUM_PULLS: usize = 30;

fn report_error(call: &str, error: &ClientError) {
    println!(
        "{}",
        json!({"event": "error", "call": call, "text": error.to_string()})
    );
}

fn check<T>(call: &str, result: ClientResult<T>) -> Option<T> {
    result.inspect_err(|error| report_error(call, error)).ok()
}

fn report_sent(body: &str, result: Option<&SendResult>) {
    let status = result.map(|result| result.send_status.to_string());
    let msg_id = result
        .and_then(|result| result.msg_id.as_ref())
        .map(ToString::to_string);
    println!(
        "{}",
        json!({"event": "sent", "body": body, "status": status, "msg_id": msg_id})
    );
}

fn body_of(message: &MessageExt) -> String {
    String::from_utf8_lossy(&message.body().unwrap_or_default()).into_owned()
}

fn report_received(listener: &str, message: &MessageExt) {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let received = json!({
        "event": "received", "listener": listener, "body": body_of(message),
        "tags": message.get_tags().map(|tags| tags.to_string()), "keys": message.get_keys().map(|keys| keys.to_string()),
        "reconsume_times": message.reconsume_times(),
        // Its `msg_id` is the one that the broker made, not the one of the send result.
        "msg_id": message.property(&"UNIQ_KEY".into()).map(|id| id.to_string()),
        "delay_ms": now.as_millis() as i64 - message.born_timestamp(),
    });
    println!("{received}");
}

fn consume(
    messages: &[&MessageExt],
    _: &ConsumeConcurrentlyContext,
) -> ClientResult<ConsumeConcurrentlyStatus> {
    for message in messages {
        report_received("plain", message);
        if body_of(message) == "fails once" && message.reconsume_times() == 0 {
            return Ok(ConsumeConcurrentlyStatus::ReconsumeLater);
        }
    }
    Ok(ConsumeConcurrentlyStatus::ConsumeSuccess)
}

fn consume_in_order(
    messages: &[&MessageExt],
    _: &mut ConsumeOrderlyContext,
) -> ClientResult<ConsumeOrderlyStatus> {
    for message in messages {
        report_received("ordered", message);
    }
    Ok(ConsumeOrderlyStatus::Success)
}

struct Program {
    runtime: Arc<ClientRuntime>,
    name_server: String,
    prefix: String,
    credentials: Option<SessionCredentials>,
}

impl Program {
    fn consumer(&self, name: &str) -> DefaultMQPushConsumer {
        DefaultMQPushConsumer::builder(self.runtime.clone())
            .consumer_group(format!("{}{name}-group", self.prefix))
            .name_server_addr(self.name_server.clone())
            .consume_from_where(ConsumeFromWhere::ConsumeFromFirstOffset)
            .rpc_hook(
                self.credentials
                    .clone()
                    .map(|keys| Arc::new(AclClientRPCHook::new(keys)) as _),
            )
            .build()
    }

    fn producer(&self) -> DefaultMQProducer {
        let builder = DefaultMQProducer::builder(self.runtime.clone())
            .producer_group(format!("{}producers", self.prefix))
            .name_server_addr(self.name_server.clone())
            .send_msg_timeout(10_000);
        match self.credentials.clone() {
            Some(keys) => builder
                .rpc_hook(Arc::new(AclClientRPCHook::new(keys)))
                .build(),
            None => builder.build(),
        }
    }

    fn message(&self, body: &str, tag: &str) -> Message {
        let topic = format!("{}plain", self.prefix);
        Message::builder()
            .topic(topic)
            .tags(tag)
            .body_slice(body.as_bytes())
            .build_unchecked()
    }

    async fn send(&self, producer: &DefaultMQProducer) {
        let mut with_key = self.message("sync", "paid");
        with_key.set_keys("k-1".into());
        let mut delayed = self.message("delayed", "late");
        delayed.set_delay_time_level(1);
        for (body, message) in [
            ("sync", with_key),
            ("not selected", self.message("not selected", "open")),
            ("delayed", delayed),
            ("fails once", self.message("fails once", "paid")),
        ] {
            if let Some(result) = check("send", producer.send(message).await) {
                report_sent(body, result.as_ref());
            }
        }
        let (done, mut is_done) = mpsc::unbounded_channel();
        let callback = move |result: Option<&SendResult>, error: Option<&ClientError>| {
            match error {
                Some(error) => report_error("send", error),
                None => report_sent("async", result),
            }
            let _ = done.send(());
        };
        if check(
            "send async",
            producer
                .send_with_callback(self.message("async", "paid"), callback)
                .await,
        )
        .is_some()
        {
            is_done.recv().await;
        }
        check(
            "send one-way",
            producer.send_oneway(self.message("one-way", "paid")).await,
        );
    }

    async fn send_ordered(&self, producer: &DefaultMQProducer) {
        for number in 0..8 {
            for key in ["a", "b"] {
                let body = format!("{key} {number}");
                let topic = format!("{}ordered", self.prefix);
                let message = Message::builder()
                    .topic(topic)
                    .body_slice(body.as_bytes())
                    .build_unchecked();
                let sending = producer.send_with_selector(
                    message,
                    |queues, message, key| SelectMessageQueueByHash.select(queues, message, key),
                    key,
                );
                if let Some(result) = check("send", sending.await) {
                    report_sent(&body, result.as_ref());
                }
            }
        }
    }

    async fn pull(&self) -> ClientResult<()> {
        let builder = DefaultLitePullConsumer::builder(self.runtime.clone())
            .consumer_group(format!("{}pull-group", self.prefix))
            .name_server_addr(self.name_server.clone())
            .consume_from_where(ConsumeFromWhere::ConsumeFromFirstOffset);
        let consumer = match self.credentials.clone() {
            Some(keys) => builder
                .rpc_hook(Arc::new(AclClientRPCHook::new(keys)))
                .build()?,
            None => builder.build()?,
        };
        consumer
            .subscribe(&format!("{}ordered", self.prefix))
            .await?;
        consumer.start().await?;
        let mut count = 0;
        for _ in 0..MAXIMUM_PULLS {
            for message in consumer.poll_with_timeout(1_000).await {
                report_received("pull", &message);
                count += 1;
            }
            if count >= PULLED {
                break;
            }
        }
        consumer.shutdown().await;
        Ok(())
    }

    async fn run(&self) {
        let mut plain = self.consumer("plain");
        // Without spaces: it hashes each tag with the spaces around it, and RocketMQ then selects no message.
        check(
            "subscribe",
            plain
                .subscribe(format!("{}plain", self.prefix), "paid||late")
                .await,
        );
        plain.register_message_listener_concurrently(consume);
        check("start consumer", plain.start().await);
        let mut ordered = self.consumer("ordered");
        check(
            "subscribe",
            ordered
                .subscribe(format!("{}ordered", self.prefix), "*")
                .await,
        );
        ordered.register_message_listener_orderly(consume_in_order);
        check("start consumer", ordered.start().await);

        let mut producer = self.producer();
        if check("start producer", producer.start().await).is_some() {
            self.send(&producer).await;
            self.send_ordered(&producer).await;
        }
        check("pull", self.pull().await);
        println!("{}", json!({"event": "finished"}));

        let _ = tokio::io::stdin().read_to_end(&mut Vec::new()).await;
        plain.shutdown().await;
        ordered.shutdown().await;
        producer.shutdown().await;
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let owner = RuntimeOwner::new()?;
    let runtime = ClientRuntime::try_new(
        owner.root_context().component("conformance"),
        ClientRuntimeConfig::default(),
        TelemetryRuntimeGuard::noop().handle(),
    )?;
    let program = Program {
        runtime: runtime.clone(),
        name_server: arguments[1].clone(),
        prefix: arguments[2].clone(),
        credentials: arguments
            .get(4)
            .map(|secret| SessionCredentials::with_keys(arguments[3].clone(), secret.clone())),
    };
    owner.block_on(async {
        program.run().await;
        runtime.shutdown().await;
    });
    owner.shutdown_runtime_blocking_with_timeout(Duration::from_secs(10))?;
    Ok(())
}
