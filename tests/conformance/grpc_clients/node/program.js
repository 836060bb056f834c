// Cases of the conformance tests with RocketMQ's gRPC client for Node.js. The module
// tests.conformance.grpc_clients.programs has the list.
//
// Arguments: ENDPOINT PREFIX CASES plain|tls [ACCESS_KEY SECRET_KEY]...
'use strict';

const { ConsumeResult, FilterExpression, Producer, PushConsumer, SimpleConsumer } = require('rocketmq-client-nodejs');
const { FilterType, TransactionResolution } = require('rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb');

const TIMEOUT_MS = 90_000;
const AWAIT_MS = 5_000;
const INVISIBLE_MS = 10_000;
const CHANGED_MS = 15_000;
const [endpoint, prefix, names, transport, ...keys] = process.argv.slice(2);
const common = {
  endpoints: endpoint,
  namespace: '',
  sslEnabled: transport === 'tls',
  sessionCredentials: keys.length ? { accessKey: keys[0], accessSecret: keys[1] } : undefined,
};
let receiveErrors = [];
let receiveMs = 0; // start of the last call of receive

// --- clients -----------------------------------------------------------------------------------------------------------

// Start a client, run `work` with it, and stop it.
async function using(client, work) {
  await client.startup();
  try {
    return await work(client);
  } finally {
    await client.shutdown();
  }
}

function producer(name, checker, options = common) {
  return new Producer({ ...options, topics: [prefix + name], checker });
}

function consumer(name, group = name, expression = FilterExpression.SUB_ALL, options = common) {
  return new SimpleConsumer({
    ...options,
    consumerGroup: `${prefix}${group}-group`,
    subscriptions: new Map([[prefix + name, expression]]),
    awaitDuration: AWAIT_MS,
  });
}

function message(name, body, options = {}) {
  return { topic: prefix + name, body: Buffer.from(body), ...options };
}

// Receive messages until the time is over. A call that failed is repeated.
async function* received(from) {
  for (const end = Date.now() + TIMEOUT_MS; Date.now() < end; ) {
    receiveMs = Date.now();
    try {
      yield* await from.receive(16, INVISIBLE_MS);
    } catch (error) {
      receiveErrors.push(String(error));
      await new Promise(resolve => setTimeout(resolve, 500));
    }
  }
}

async function receiveAndAcknowledge(from, count) {
  const found = [];
  for await (const each of received(from)) {
    await from.ack(each);
    if (found.push(each) === count) return found;
  }
  throw new Error(`${found.length} of ${count} messages arrived in time`);
}

// Run a push consumer until it has consumed `count` messages, or the time is over.
async function consume(name, count, fails = () => false) {
  const deliveries = new Deliveries();
  const messageListener = {
    async consume(view) {
      return fails(view.body.toString(), deliveries.add(view, Date.now())) ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
    },
  };
  const subscriptions = new Map([[prefix + name, FilterExpression.SUB_ALL]]);
  const push = new PushConsumer({ ...common, consumerGroup: `${prefix}${name}-group`, subscriptions, messageListener });
  await using(push, () => deliveries.wait(count));
  return deliveries.all;
}

// Deliveries of a consumer.
class Deliveries {
  all = [];
  #first = new Map();
  #added = () => {};

  // Add a delivery by a call that started at `startMs`, and return how often its body was delivered.
  add(view, startMs) {
    const body = view.body.toString();
    if (!this.#first.has(body)) this.#first.set(body, startMs);
    this.all.push({ body, attempt: view.deliveryAttempt, after_ms: Date.now() - this.#first.get(body) });
    this.#added();
    return this.all.filter(each => each.body === body).length;
  }

  wait(count) {
    return new Promise(resolve => {
      const timer = setTimeout(resolve, TIMEOUT_MS);
      this.#added = () => {
        if (this.all.length < count) return;
        clearTimeout(timer);
        setImmediate(resolve);
      };
      this.#added();
    });
  }
}

// --- cases -------------------------------------------------------------------------------------------------------------

const cases = {
  async normal() {
    const properties = new Map([['color', 'red']]);
    const options = { tag: 'paid', keys: ['k-1', 'k-2'], properties };
    const sent = await using(producer('normal'), from => from.send(message('normal', 'hello', options)));
    const [found] = await using(consumer('normal'), from => receiveAndAcknowledge(from, 1));
    return {
      sent: sent.messageId,
      received: {
        id: found.messageId,
        body: found.body.toString(),
        tag: found.tag,
        keys: [...found.keys].sort(),
        properties: Object.fromEntries(found.properties),
        attempt: found.deliveryAttempt,
      },
    };
  },

  async fifo() {
    await using(producer('fifo'), async from => {
      for (let number = 0; number < 4; number++) {
        for (const messageGroup of 'ab') await from.send(message('fifo', `${messageGroup} ${number}`, { messageGroup }));
      }
    });
    return { received: (await consume('fifo', 8)).map(each => each.body) };
  },

  async delay() {
    return await using(producer('delay'), to => using(consumer('delay'), async from => {
      const deliverMs = Math.ceil(Date.now() / 1_000) * 1_000 + 3_000; // The client sends whole seconds.
      await to.send(message('delay', 'delayed', { deliveryTimestamp: new Date(deliverMs) }));
      const [found] = await receiveAndAcknowledge(from, 1);
      return { deliver_ms: deliverMs, received_ms: Date.now(), body: found.body.toString() };
    }));
  },

  async transaction() {
    const checked = [];
    const checker = {
      async check(view) {
        checked.push(view.body.toString());
        return TransactionResolution.COMMIT;
      },
    };
    return await using(producer('transaction', checker), to => using(consumer('transaction'), async from => {
      for (const body of ['committed', 'rolled back', 'checked']) {
        const transaction = to.beginTransaction();
        await to.send(message('transaction', body), transaction);
        if (body === 'committed') await transaction.commit();
        if (body === 'rolled back') await transaction.rollback();
      }
      const found = await receiveAndAcknowledge(from, 2);
      return { received: found.map(each => each.body.toString()).sort(), checked };
    }));
  },

  async simple() {
    await using(producer('simple'), async to => {
      for (const body of ['acked', 'changed', 'expires']) await to.send(message('simple', body));
    });
    const deliveries = new Deliveries();
    await using(consumer('simple'), async from => {
      for await (const each of received(from)) {
        const body = each.body.toString();
        const number = deliveries.add(each, receiveMs);
        if (body === 'acked' || number > 1) await from.ack(each);
        else if (body === 'changed') await from.changeInvisibleDuration(each, CHANGED_MS);
        if (deliveries.all.length === 5) break;
      }
    });
    return { deliveries: deliveries.all };
  },

  async push() {
    await using(producer('push'), async to => {
      for (const body of ['ok', 'fails once', 'fails always']) await to.send(message('push', body));
    });
    const fails = (body, number) => body === 'fails always' || (body === 'fails once' && number === 1);
    return { deliveries: await consume('push', 6, fails) };
  },

  async filter() {
    await using(producer('filter'), async to => {
      for (const [body, tag, amount] of [['b', 'open', '50'], ['a', 'paid', '5'], ['c', 'late', '500']]) {
        await to.send(message('filter', body, { tag, properties: new Map([['amount', amount]]) }));
      }
    });
    const selected = async (group, expression) => {
      const found = await using(consumer('filter', group, expression), from => receiveAndAcknowledge(from, 2));
      return found.map(each => each.body.toString()).sort();
    };
    return {
      tags: await selected('filter-tags', new FilterExpression('paid || late')),
      sql: await selected('filter-sql', new FilterExpression('amount > 10', FilterType.SQL)),
    };
  },

  async recall() {
    return await using(producer('recall'), to => using(consumer('recall'), async from => {
      const send = (body, delay) => to.send(message('recall', body, { delay }));
      const sent = await send('recalled', 9_000);
      await send('kept', 10_000);
      const recalled = await to.recallMessage(`${prefix}recall`, sent.recallHandle);
      const found = await receiveAndAcknowledge(from, 1);
      return { sent: sent.messageId, recalled: recalled.messageId, received: found.map(each => each.body.toString()) };
    }));
  },

  async rights() {
    const accounts = [];
    for (let at = 0; at < keys.length; at += 2) accounts.push({ accessKey: keys[at], accessSecret: keys[at + 1] });
    const outcomes = async sessionCredentials => {
      const options = { ...common, sessionCredentials };
      const send = () => using(producer('rights', undefined, options), to => to.send(message('rights', 'hello')));
      const receive = () =>
        using(consumer('rights', 'rights', FilterExpression.SUB_ALL, options), async from => {
          for (const each of await from.receive(1, INVISIBLE_MS)) await from.ack(each);
        });
      return { send: await outcome(send), receive: await outcome(receive) };
    };
    return { outcomes: await Promise.all(accounts.map(outcomes)) };
  },
};

// Return "ok", or the error of a call.
async function outcome(call) {
  try {
    await call();
    return 'ok';
  } catch (error) {
    return String(error);
  }
}

async function main() {
  process.stdin.on('end', () => process.exit(1)).resume();
  for (const name of names.split(',')) {
    receiveErrors = [];
    let result;
    try {
      result = { ...(await cases[name]()), receive_errors: receiveErrors };
    } catch (error) {
      result = { error: String(error) };
    }
    console.log(JSON.stringify({ case: name, ...result }));
  }
  process.exit(0); // Timers of the client may still run.
}

main();
