// A program with RocketMQ's Go client v2. tests/conformance/client_programs.py describes what each such program does.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/admin"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

type event map[string]interface{}

var output sync.Mutex

func report(printed event) {
	line, err := json.Marshal(printed)
	if err != nil {
		panic(err)
	}
	output.Lock()
	defer output.Unlock()
	fmt.Println(string(line))
}

func check(call string, err error) bool {
	if err != nil {
		report(event{"event": "error", "call": call, "text": err.Error()})
	}
	return err == nil
}

func reportSent(body string, result *primitive.SendResult, err error) {
	if !check("send", err) {
		return
	}
	status := map[primitive.SendStatus]string{primitive.SendOK: "SEND_OK"}[result.Status]
	report(event{"event": "sent", "body": body, "status": status, "msg_id": result.MsgID})
}

func reportReceived(listener string, message *primitive.MessageExt) {
	report(event{
		"event": "received", "listener": listener, "body": string(message.Body), "tags": message.GetTags(),
		"keys": message.GetKeys(), "reconsume_times": message.ReconsumeTimes, "msg_id": message.MsgId,
		"delay_ms": time.Now().UnixMilli() - message.BornTimestamp,
	})
}

type program struct {
	resolver    primitive.NsResolver
	prefix      string
	credentials primitive.Credentials
}

func (p *program) consume(name string, tags string, ordered bool) rocketmq.PushConsumer {
	pushed, err := rocketmq.NewPushConsumer(
		consumer.WithNsResolver(p.resolver),
		consumer.WithGroupName(p.prefix+name+"-group"),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumerOrder(ordered),
		consumer.WithCredentials(p.credentials),
	)
	if !check("new consumer", err) {
		return nil
	}
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: tags}
	err = pushed.Subscribe(p.prefix+name, selector, func(
		_ context.Context, messages ...*primitive.MessageExt,
	) (consumer.ConsumeResult, error) {
		for _, message := range messages {
			reportReceived(name, message)
			if string(message.Body) == "fails once" && message.ReconsumeTimes == 0 {
				return consumer.ConsumeRetryLater, nil
			}
		}
		return consumer.ConsumeSuccess, nil
	})
	if !check("subscribe", err) || !check("start consumer", pushed.Start()) {
		return nil
	}
	return pushed
}

// produce starts a producer. The producers of a process need different groups.
func (p *program) produce(group string, options ...producer.Option) rocketmq.Producer {
	sender, err := rocketmq.NewProducer(append([]producer.Option{
		producer.WithNsResolver(p.resolver),
		producer.WithGroupName(p.prefix + group),
		producer.WithCredentials(p.credentials),
		producer.WithSendMsgTimeout(10 * time.Second),
	}, options...)...)
	if !check("new producer", err) || !check("start producer", sender.Start()) {
		return nil
	}
	return sender
}

func (p *program) send(sender rocketmq.Producer) {
	message := func(body string, tag string) *primitive.Message {
		return primitive.NewMessage(p.prefix+"plain", []byte(body)).WithTag(tag)
	}
	for _, sent := range []*primitive.Message{
		message("sync", "paid").WithKeys([]string{"k-1"}),
		message("not selected", "open"),
		message("delayed", "late").WithDelayTimeLevel(1),
		message("fails once", "paid"),
	} {
		result, err := sender.SendSync(context.Background(), sent)
		reportSent(string(sent.Body), result, err)
	}
	done := make(chan struct{})
	err := sender.SendAsync(context.Background(), func(_ context.Context, result *primitive.SendResult, err error) {
		reportSent("async", result, err)
		close(done)
	}, message("async", "paid"))
	if check("send async", err) {
		<-done
	}
	check("send one-way", sender.SendOneWay(context.Background(), message("one-way", "paid")))
}

func (p *program) sendOrdered(sender rocketmq.Producer) {
	for number := 0; number < 8; number++ {
		for _, key := range []string{"a", "b"} {
			body := fmt.Sprintf("%s %d", key, number)
			sent := primitive.NewMessage(p.prefix+"ordered", []byte(body)).WithShardingKey(key)
			result, err := sender.SendSync(context.Background(), sent)
			reportSent(body, result, err)
		}
	}
}

// pull reads the topic with a pull consumer, which asks the name server for routes without a signature.
func (p *program) pull(queues []*primitive.MessageQueue) {
	puller, err := rocketmq.NewPullConsumer(
		consumer.WithNsResolver(p.resolver),
		consumer.WithGroupName(p.prefix+"pull-group"),
		consumer.WithCredentials(p.credentials),
	)
	if !check("new pull consumer", err) {
		return
	}
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: "*"}
	if !check("subscribe", puller.Subscribe(p.prefix+"ordered", selector)) || !check("start pull", puller.Start()) {
		return
	}
	for _, queue := range queues {
		result, err := puller.PullFrom(context.Background(), queue, 0, 32)
		if check("pull", err) && result.Status == primitive.PullFound {
			for _, message := range result.GetMessageExts() {
				reportReceived("pull", message)
			}
		}
	}
	check("stop pull", puller.Shutdown())
}

func main() {
	rlog.SetLogLevel("fatal")
	p := &program{resolver: primitive.NewPassthroughResolver([]string{os.Args[1]}), prefix: os.Args[2]}
	if len(os.Args) > 3 {
		p.credentials = primitive.Credentials{AccessKey: os.Args[3], SecretKey: os.Args[4]}
	}
	plain := p.consume("plain", "paid || late", false)
	ordered := p.consume("ordered", "*", true)
	sender := p.produce("producers")
	p.send(sender)
	byKey := p.produce("ordered-producers", producer.WithQueueSelector(producer.NewHashQueueSelector()))
	p.sendOrdered(byKey)

	tools, err := admin.NewAdmin(admin.WithResolver(p.resolver), admin.WithCredentials(p.credentials))
	if check("new admin", err) {
		queues, err := tools.FetchPublishMessageQueues(context.Background(), p.prefix+"ordered")
		if check("queues", err) {
			p.pull(queues)
		}
	}
	report(event{"event": "finished"})

	io.Copy(io.Discard, os.Stdin)
	for _, started := range []rocketmq.PushConsumer{plain, ordered} {
		if started != nil {
			check("stop consumer", started.Shutdown())
		}
	}
	for _, started := range []rocketmq.Producer{sender, byKey} {
		check("stop producer", started.Shutdown())
	}
}
