//! A program with the client rocketmq-client-v4. tests/conformance/client_programs.py describes what each such program does.

use std::sync::Arc;

use rocketmq_client_v4::consumer::message_handler::MessageHandler;
use rocketmq_client_v4::consumer::pull_consumer_v2::PullConsumer;
use rocketmq_client_v4::producer::Producer;
use rocketmq_client_v4::protocols::body::message_body::MessageBody;
use rocketmq_client_v4::protocols::get_current_time_millis;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::sync::RwLock;

struct Listener;

impl MessageHandler for Listener {
    async fn handle(&self, message: &MessageBody) {
        // It splits properties at the digits 1 and 2 instead of at the characters \x01 and \x02: there is no tag and no key.
        let received = json!({
            "event": "received", "listener": "plain", "body": String::from_utf8_lossy(&message.body),
            "tags": null, "keys": null, "reconsume_times": message.reconsume_times, "msg_id": message.msg_id,
            "delay_ms": get_current_time_millis() - message.born_timestamp,
        });
        println!("{received}");
    }
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (name_server, prefix) = (arguments[1].clone(), arguments[2].clone());
    let topic = format!("{prefix}plain");

    let consumer = PullConsumer::new(
        name_server.clone(),
        format!("{prefix}plain-group"),
        topic.clone(),
    );
    let runs = Arc::new(RwLock::new(true));
    consumer
        .start_consume(Arc::new(Listener), runs.clone())
        .await;

    let mut producer = Producer::new(format!("{prefix}producers"), name_server).await;
    for (body, tag) in [
        ("sync", "paid"),
        ("not selected", "open"),
        ("fails once", "paid"),
    ] {
        let sending = producer.send_message_with_tag(
            topic.clone(),
            tag.to_string(),
            body.into(),
            "k-1".to_string(),
        );
        let event = match sending.await {
            // It does not wait for the answer of the broker.
            Ok(()) => json!({"event": "sent", "body": body, "status": null, "msg_id": null}),
            Err(error) => json!({"event": "error", "call": "send", "text": error.to_string()}),
        };
        println!("{event}");
    }
    println!("{}", json!({"event": "finished"}));

    let _ = tokio::io::stdin().read_to_end(&mut Vec::new()).await;
    *runs.write().await = false;
}
