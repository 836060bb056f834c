// A program with the Node.js client ali-ons. tests/conformance/client_programs.py describes what each such program does.
'use strict';

const { Consumer, Message, Producer } = require('ali-ons');
const ConsumeFromWhere = require('ali-ons/lib/consumer/consume_from_where');

const [nameSrv, prefix, accessKeyId, accessKeySecret] = process.argv.slice(2);

const report = event => process.stdout.write(JSON.stringify(event) + '\n');
const reportError = call => error => report({ event: 'error', call, text: String(error && error.message) });

const quiet = () => {};
const options = {
  httpclient: {}, // It asks for the address of a name server, if `nameSrv` is not set.
  nameSrv,
  onsChannel: 'CLOUD',
  logger: { info: quiet, debug: quiet, warn: console.error, error: console.error },
};
if (accessKeyId) {
  Object.assign(options, { accessKeyId, accessKeySecret });
}

async function send(producer, body, tag, change = quiet) {
  const message = new Message(`${prefix}plain`, tag, body);
  change(message);
  try {
    const result = await producer.send(message);
    report({ event: 'sent', body, status: result.sendStatus, msg_id: result.msgId });
  } catch (error) {
    reportError('send')(error);
  }
}

async function main() {
  const consumer = new Consumer({
    ...options,
    consumerGroup: `${prefix}plain-group`,
    consumeFromWhere: ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
  });
  consumer.on('error', error => {
    // It regards the answer of RocketMQ for a group without an offset as an error, and continues at the first message.
    if (!String(error && error.message).includes('maybe this group consumer boot first')) {
      reportError('consume')(error);
    }
  });
  consumer.subscribe(`${prefix}plain`, 'paid || late', async message => {
    const body = message.body.toString();
    report({
      event: 'received', listener: 'plain', body, tags: message.tags, keys: message.keys,
      reconsume_times: message.reconsumeTimes, msg_id: message.msgId,
      delay_ms: Date.now() - Number(message.bornTimestamp),
    });
    return body === 'fails once' && message.reconsumeTimes === 0 ? Consumer.ACTION_RETRY : undefined;
  });

  const producer = new Producer({ ...options, producerGroup: `${prefix}producers` });
  producer.on('error', reportError('produce'));
  await send(producer, 'sync', 'paid', message => { message.keys = [ 'k-1' ]; });
  await send(producer, 'not selected', 'open');
  await send(producer, 'delayed', 'late', message => { message.delayTimeLevel = 1; });
  await send(producer, 'fails once', 'paid');
  report({ event: 'finished' });

  process.stdin.resume();
  await new Promise(resolve => process.stdin.once('end', resolve));
  await consumer.close().catch(reportError('close')); // Without a valid signature RocketMQ refuses to unregister a client.
  await producer.close().catch(reportError('close'));
  process.exit(0); // The client keeps a producer of its own open.
}

main().catch(error => {
  reportError('program')(error);
  process.exit(1);
});
