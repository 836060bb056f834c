//! Cases of the conformance tests with RocketMQ's gRPC client for Rust. The module tests.conformance.grpc_clients.programs
//! has the list.
//!
//! Arguments: ENDPOINT PREFIX CASES plain|tls [ACCESS_KEY SECRET_KEY]...

use std::collections::HashMap;
use std::error::Error;
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::{MessageBuilder, MessageView};
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};
use serde_json::{json, Value};

const TIMEOUT: Duration = Duration::from_secs(90);
/// It is the deadline of the call too, and servers refuse a deadline of less than five seconds.
const AWAIT: Duration = Duration::from_secs(10);
const INVISIBLE: Duration = Duration::from_secs(10);

type Outcome<T> = Result<T, Box<dyn Error>>;

struct Program {
    prefix: String,
    option: ClientOption,
    accounts: Vec<ClientOption>,
    receive_errors: Mutex<Vec<String>>,
}

impl Program {
    fn new(arguments: &[String]) -> Program {
        let mut option = ClientOption::default();
        option.set_access_url(&arguments[0]);
        option.set_enable_tls(arguments[3] == "tls");
        option.set_long_polling_timeout(AWAIT);
        let mut options = vec![];
        for keys in arguments[4..].chunks(2) {
            let mut option = option.clone();
            option.set_access_key(&keys[0]);
            option.set_secret_key(&keys[1]);
            options.push(option);
        }
        Program {
            prefix: arguments[1].clone(),
            option: options.first().cloned().unwrap_or(option),
            accounts: options,
            receive_errors: Mutex::default(),
        }
    }

    async fn run(&self, name: &str) -> Outcome<Value> {
        match name {
            "normal" => self.normal().await,
            "fifo" => self.fifo().await,
            "delay" => self.delay().await,
            "transaction" => self.transaction().await,
            "simple" => self.simple().await,
            "filter" => self.filter().await,
            "rights" => self.rights().await,
            _ => Err(format!("no such case: {name}").into()),
        }
    }

    // --- clients ---------------------------------------------------------------------------------------------------

    fn topic(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn producer_option(&self, name: &str) -> ProducerOption {
        let mut option = ProducerOption::default();
        option.set_topics(vec![self.topic(name)]);
        option
    }

    async fn producer(&self, name: &str) -> Outcome<Producer> {
        let mut producer = Producer::new(self.producer_option(name), self.option.clone())?;
        producer.start().await?;
        Ok(producer)
    }

    async fn consumer(&self, name: &str, group: &str) -> Outcome<SimpleConsumer> {
        let mut option = SimpleConsumerOption::default();
        option.set_topics(vec![self.topic(name)]);
        option.set_consumer_group(format!("{}{group}-group", self.prefix));
        let mut consumer = SimpleConsumer::new(option, self.option.clone())?;
        consumer.start().await?;
        Ok(consumer)
    }

    /// Receive and acknowledge messages until there are `count` of them, or the time is over.
    async fn receive(
        &self,
        consumer: &SimpleConsumer,
        name: &str,
        expression: &FilterExpression,
        count: usize,
    ) -> Outcome<Vec<MessageView>> {
        let mut found = vec![];
        let start = Instant::now();
        while found.len() < count && start.elapsed() < TIMEOUT {
            match consumer.receive_with(self.topic(name), expression, 16, INVISIBLE).await {
                Ok(messages) => {
                    for message in messages {
                        consumer.ack(&message).await?;
                        found.push(message);
                    }
                }
                Err(error) => self.receive_failed(error.to_string()).await,
            }
        }
        if found.len() < count {
            return Err(format!("{} of {count} messages arrived in time", found.len()).into());
        }
        Ok(found)
    }

    async fn receive_failed(&self, error: String) {
        self.receive_errors.lock().unwrap().push(error);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }

    async fn receive_all(&self, name: &str, count: usize) -> Outcome<Vec<MessageView>> {
        let consumer = self.consumer(name, name).await?;
        let found = self.receive(&consumer, name, &all(), count).await;
        consumer.shutdown().await?;
        found
    }

    // --- cases -----------------------------------------------------------------------------------------------------

    async fn normal(&self) -> Outcome<Value> {
        let producer = self.producer("normal").await?;
        let message = MessageBuilder::builder()
            .set_topic(self.topic("normal"))
            .set_body(b"hello".to_vec())
            .set_tag("paid")
            .set_keys(vec!["k-1", "k-2"])
            .set_properties(HashMap::from([("color", "red")]))
            .build()?;
        let sent = producer.send(message).await?;
        producer.shutdown().await?;
        let messages = self.receive_all("normal", 1).await?;
        let found = &messages[0];
        let mut keys = found.keys().to_vec();
        keys.sort();
        let received = json!({
            "id": found.message_id(), "body": body(found), "tag": found.tag(), "keys": keys,
            "properties": found.properties(), "attempt": found.delivery_attempt(),
        });
        Ok(json!({"sent": sent.message_id(), "received": received}))
    }

    async fn fifo(&self) -> Outcome<Value> {
        let producer = self.producer("fifo").await?;
        for number in 0..4 {
            for group in ["a", "b"] {
                let body = format!("{group} {number}").into_bytes();
                producer
                    .send(MessageBuilder::fifo_message_builder(self.topic("fifo"), body, group).build()?)
                    .await?;
            }
        }
        producer.shutdown().await?;
        Ok(json!({"received": bodies(&self.receive_all("fifo", 8).await?)}))
    }

    async fn delay(&self) -> Outcome<Value> {
        let producer = self.producer("delay").await?;
        let deliver_s = now_ms() / 1_000 + 4; // The client sends whole seconds.
        let message = MessageBuilder::delay_message_builder(self.topic("delay"), b"delayed".to_vec(), deliver_s);
        producer.send(message.build()?).await?;
        let found = self.receive_all("delay", 1).await?;
        let received_ms = now_ms();
        producer.shutdown().await?;
        Ok(json!({"deliver_ms": deliver_s * 1_000, "received_ms": received_ms, "body": body(&found[0])}))
    }

    async fn transaction(&self) -> Outcome<Value> {
        let checked = Arc::new(Mutex::new(vec![]));
        let kept = checked.clone();
        let checker = move |_: String, message: MessageView| {
            kept.lock().unwrap().push(body(&message));
            TransactionResolution::COMMIT
        };
        let option = self.producer_option("transaction");
        let mut producer = Producer::new_transaction_producer(option, self.option.clone(), Box::new(checker))?;
        producer.start().await?;
        for body in ["committed", "rolled back", "checked"] {
            let message =
                MessageBuilder::transaction_message_builder(self.topic("transaction"), body.as_bytes().to_vec());
            let transaction = producer.send_transaction_message(message.build()?).await?;
            match body {
                "committed" => transaction.commit().await?,
                "rolled back" => transaction.rollback().await?,
                _ => {}
            }
        }
        let mut received = bodies(&self.receive_all("transaction", 2).await?);
        received.sort();
        producer.shutdown().await?;
        let checked = checked.lock().unwrap().clone();
        Ok(json!({"received": received, "checked": checked}))
    }

    /// The client cannot change the invisible time: `changed` expires.
    async fn simple(&self) -> Outcome<Value> {
        let producer = self.producer("simple").await?;
        for body in ["acked", "changed", "expires"] {
            let message = MessageBuilder::builder().set_topic(self.topic("simple")).set_body(body.as_bytes().to_vec());
            producer.send(message.build()?).await?;
        }
        producer.shutdown().await?;
        let consumer = self.consumer("simple", "simple").await?;
        let mut deliveries: Vec<Value> = vec![];
        let mut first: HashMap<String, Instant> = HashMap::new();
        let start = Instant::now();
        while deliveries.len() < 5 && start.elapsed() < TIMEOUT {
            let call = Instant::now();
            match consumer.receive_with(self.topic("simple"), &all(), 16, INVISIBLE).await {
                Ok(messages) => {
                    for message in messages {
                        let body = body(&message);
                        let again = first.contains_key(&body);
                        let after = first.entry(body.clone()).or_insert(call).elapsed().as_millis() as u64;
                        deliveries
                            .push(json!({"body": body, "attempt": message.delivery_attempt(), "after_ms": after}));
                        if again || body == "acked" {
                            consumer.ack(&message).await?;
                        }
                    }
                }
                Err(error) => self.receive_failed(error.to_string()).await,
            }
        }
        consumer.shutdown().await?;
        Ok(json!({"deliveries": deliveries}))
    }

    async fn filter(&self) -> Outcome<Value> {
        let producer = self.producer("filter").await?;
        for (body, tag, amount) in [("b", "open", "50"), ("a", "paid", "5"), ("c", "late", "500")] {
            let message = MessageBuilder::builder()
                .set_topic(self.topic("filter"))
                .set_body(body.as_bytes().to_vec())
                .set_tag(tag)
                .set_properties(HashMap::from([("amount", amount)]));
            producer.send(message.build()?).await?;
        }
        producer.shutdown().await?;
        let tags = self
            .selected("filter-tags", FilterExpression::new(FilterType::Tag, "paid || late"))
            .await?;
        let sql = self
            .selected("filter-sql", FilterExpression::new(FilterType::Sql, "amount > 10"))
            .await?;
        Ok(json!({"tags": tags, "sql": sql}))
    }

    async fn selected(&self, group: &str, expression: FilterExpression) -> Outcome<Vec<String>> {
        let consumer = self.consumer("filter", group).await?;
        let mut found = bodies(&self.receive(&consumer, "filter", &expression, 2).await?);
        consumer.shutdown().await?;
        found.sort();
        Ok(found)
    }

    async fn rights(&self) -> Outcome<Value> {
        let mut outcomes = vec![];
        for option in &self.accounts {
            let account = Program {
                prefix: self.prefix.clone(),
                option: option.clone(),
                accounts: vec![],
                receive_errors: Mutex::default(),
            };
            outcomes.push(json!({
                "send": outcome(account.send_one().await),
                "receive": outcome(account.receive_one().await),
            }));
        }
        Ok(json!({"outcomes": outcomes}))
    }

    async fn send_one(&self) -> Outcome<()> {
        let producer = self.producer("rights").await?;
        let message = MessageBuilder::builder().set_topic(self.topic("rights")).set_body(b"hello".to_vec());
        producer.send(message.build()?).await?;
        producer.shutdown().await?;
        Ok(())
    }

    async fn receive_one(&self) -> Outcome<()> {
        let consumer = self.consumer("rights", "rights").await?;
        for message in consumer.receive_with(self.topic("rights"), &all(), 1, INVISIBLE).await? {
            consumer.ack(&message).await?;
        }
        consumer.shutdown().await?;
        Ok(())
    }
}

/// "ok", or the error of a call.
fn outcome(result: Outcome<()>) -> String {
    match result {
        Ok(()) => "ok".into(),
        Err(error) => error.to_string(),
    }
}

fn all() -> FilterExpression {
    FilterExpression::new(FilterType::Tag, "*")
}

fn body(message: &MessageView) -> String {
    String::from_utf8_lossy(message.body()).into_owned()
}

fn bodies(messages: &[MessageView]) -> Vec<String> {
    messages.iter().map(body).collect()
}

fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64
}

#[tokio::main]
async fn main() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut vec![]);
        std::process::exit(1);
    });
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let program = Program::new(&arguments);
    for name in arguments[2].split(',') {
        program.receive_errors.lock().unwrap().clear();
        let mut result = match program.run(name).await {
            Ok(result) => result,
            Err(error) => json!({"error": error.to_string()}),
        };
        result["case"] = json!(name);
        result["receive_errors"] = json!(*program.receive_errors.lock().unwrap());
        println!("{result}");
    }
    std::process::exit(0); // Tasks of the client may still run.
}
