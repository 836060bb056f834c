// Cases of the conformance tests with RocketMQ's gRPC client for Go. The module tests.conformance.grpc_clients.programs
// has the list.
//
// Arguments: ENDPOINT PREFIX CASES plain|tls [ACCESS_KEY SECRET_KEY]...
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

const (
	timeout   = 90 * time.Second
	await     = 5 * time.Second
	invisible = 10 * time.Second
	changed   = 15 * time.Second
	refused   = 30 * time.Second // a client that has not started by then is refused
)

type result map[string]interface{}

type program struct {
	endpoint, prefix string
	credentials      credentials.SessionCredentials
	receiveErrors    []string
	receiveStart     time.Time // of the last call of Receive
}

func main() {
	go exitWithStandardInput()
	rocketmq.EnableSsl = os.Args[4] == "tls"
	p := &program{endpoint: os.Args[1], prefix: os.Args[2]}
	if len(os.Args) > 5 {
		p.credentials = credentials.SessionCredentials{AccessKey: os.Args[5], AccessSecret: os.Args[6]}
	}
	cases := map[string]func() (result, error){
		"normal": p.normal, "fifo": p.fifo, "delay": p.delay, "transaction": p.transaction,
		"simple": p.simple, "push": p.push, "filter": p.filter, "rights": p.rights,
	}
	for _, name := range strings.Split(os.Args[3], ",") {
		p.receiveErrors = []string{}
		found, err := cases[name]()
		if err != nil {
			found = result{"error": err.Error()}
		} else {
			found["receive_errors"] = p.receiveErrors
		}
		found["case"] = name
		text, _ := json.Marshal(found)
		fmt.Println(string(text))
	}
}

func exitWithStandardInput() {
	buffer := make([]byte, 1024)
	for {
		if _, err := os.Stdin.Read(buffer); err != nil {
			os.Exit(1)
		}
	}
}

// --- clients -----------------------------------------------------------------------------------------------------------

func (p *program) config(group string) *rocketmq.Config {
	return &rocketmq.Config{Endpoint: p.endpoint, ConsumerGroup: group, Credentials: &p.credentials}
}

func (p *program) producer(name string, options ...rocketmq.ProducerOption) (rocketmq.Producer, error) {
	producer, err := rocketmq.NewProducer(p.config(""), append(options, rocketmq.WithTopics(p.prefix+name))...)
	if err != nil {
		return nil, err
	}
	return producer, producer.Start()
}

func (p *program) consumer(name, group string, expression *rocketmq.FilterExpression) (rocketmq.SimpleConsumer, error) {
	expressions := map[string]*rocketmq.FilterExpression{p.prefix + name: expression}
	consumer, err := rocketmq.NewSimpleConsumer(p.config(p.prefix+group+"-group"),
		rocketmq.WithSimpleAwaitDuration(await), rocketmq.WithSimpleSubscriptionExpressions(expressions))
	if err != nil {
		return nil, err
	}
	return consumer, consumer.Start()
}

func (p *program) message(name, body string) *rocketmq.Message {
	return &rocketmq.Message{Topic: p.prefix + name, Body: []byte(body)}
}

func send(producer rocketmq.Producer, message *rocketmq.Message) (*rocketmq.SendReceipt, error) {
	receipts, err := producer.Send(context.Background(), message)
	if err != nil {
		return nil, err
	}
	return receipts[0], nil
}

// receive receives messages until one is the last, or the time is over.
func (p *program) receive(consumer rocketmq.SimpleConsumer, isLast func(*rocketmq.MessageView) (bool, error)) error {
	for end := time.Now().Add(timeout); time.Now().Before(end); {
		p.receiveStart = time.Now()
		messages, err := consumer.Receive(context.Background(), 16, invisible)
		if err != nil && !isNoMessage(err) {
			p.receiveErrors = append(p.receiveErrors, err.Error())
			time.Sleep(500 * time.Millisecond)
		}
		for _, message := range messages {
			if last, err := isLast(message); err != nil || last {
				return err
			}
		}
	}
	return nil
}

// isNoMessage tells the client's error for a receive call without messages from a failure.
func isNoMessage(err error) bool {
	status, ok := rocketmq.AsErrRpcStatus(err)
	return ok && status.GetCode() == 40401
}

func (p *program) receiveAndAcknowledge(consumer rocketmq.SimpleConsumer, count int) ([]*rocketmq.MessageView, error) {
	found := []*rocketmq.MessageView{}
	err := p.receive(consumer, func(message *rocketmq.MessageView) (bool, error) {
		found = append(found, message)
		return len(found) == count, consumer.Ack(context.Background(), message)
	})
	if err == nil && len(found) < count {
		err = fmt.Errorf("%d of %d messages arrived in time", len(found), count)
	}
	return found, err
}

// consume runs a push consumer until it has consumed a number of messages.
func (p *program) consume(name string, count int, fails func(body string, number int) bool) (*deliveries, error) {
	found := newDeliveries()
	consume := func(message *rocketmq.MessageView) rocketmq.ConsumerResult {
		if fails(string(message.GetBody()), found.add(message, time.Now())) {
			return rocketmq.FAILURE
		}
		return rocketmq.SUCCESS
	}
	expressions := map[string]*rocketmq.FilterExpression{p.prefix + name: rocketmq.SUB_ALL}
	consumer, err := rocketmq.NewPushConsumer(p.config(p.prefix+name+"-group"),
		rocketmq.WithPushAwaitDuration(await), rocketmq.WithPushSubscriptionExpressions(expressions),
		rocketmq.WithPushMessageListener(&rocketmq.FuncMessageListener{Consume: consume}),
		rocketmq.WithPushConsumptionThreadCount(4), rocketmq.WithPushMaxCacheMessageCount(1024))
	if err != nil {
		return nil, err
	}
	if err := consumer.Start(); err != nil {
		return nil, err
	}
	found.await(count)
	return found, consumer.GracefulStop()
}

func sortedBodies(messages []*rocketmq.MessageView) []string {
	bodies := []string{}
	for _, message := range messages {
		bodies = append(bodies, string(message.GetBody()))
	}
	sort.Strings(bodies)
	return bodies
}

// --- cases -------------------------------------------------------------------------------------------------------------

func (p *program) normal() (result, error) {
	producer, err := p.producer("normal")
	if err != nil {
		return nil, err
	}
	message := p.message("normal", "hello")
	message.SetTag("paid")
	message.SetKeys("k-1", "k-2")
	message.AddProperty("color", "red")
	sent, err := send(producer, message)
	if err != nil {
		return nil, err
	}
	defer producer.GracefulStop()
	consumer, err := p.consumer("normal", "normal", rocketmq.SUB_ALL)
	if err != nil {
		return nil, err
	}
	defer consumer.GracefulStop()
	messages, err := p.receiveAndAcknowledge(consumer, 1)
	if err != nil {
		return nil, err
	}
	found := messages[0]
	keys := found.GetKeys()
	sort.Strings(keys)
	received := result{
		"id": found.GetMessageId(), "body": string(found.GetBody()), "tag": found.GetTag(), "keys": keys,
		"properties": found.GetProperties(), "attempt": found.GetDeliveryAttempt(),
	}
	return result{"sent": sent.MessageID, "received": received}, nil
}

func (p *program) fifo() (result, error) {
	producer, err := p.producer("fifo")
	if err != nil {
		return nil, err
	}
	defer producer.GracefulStop()
	for number := 0; number < 4; number++ {
		for _, group := range []string{"a", "b"} {
			message := p.message("fifo", fmt.Sprintf("%s %d", group, number))
			message.SetMessageGroup(group)
			if _, err := send(producer, message); err != nil {
				return nil, err
			}
		}
	}
	found, err := p.consume("fifo", 8, func(string, int) bool { return false })
	if err != nil {
		return nil, err
	}
	return result{"received": found.bodies()}, nil
}

func (p *program) delay() (result, error) {
	producer, err := p.producer("delay")
	if err != nil {
		return nil, err
	}
	defer producer.GracefulStop()
	consumer, err := p.consumer("delay", "delay", rocketmq.SUB_ALL)
	if err != nil {
		return nil, err
	}
	defer consumer.GracefulStop()
	deliver := time.Now().Add(3 * time.Second)
	message := p.message("delay", "delayed")
	message.SetDelayTimestamp(deliver)
	if _, err := send(producer, message); err != nil {
		return nil, err
	}
	messages, err := p.receiveAndAcknowledge(consumer, 1)
	if err != nil {
		return nil, err
	}
	received := time.Now().UnixMilli()
	return result{"deliver_ms": deliver.UnixMilli(), "received_ms": received, "body": string(messages[0].GetBody())}, nil
}

func (p *program) transaction() (result, error) {
	var mutex sync.Mutex
	checked := []string{}
	check := func(message *rocketmq.MessageView) rocketmq.TransactionResolution {
		mutex.Lock()
		defer mutex.Unlock()
		checked = append(checked, string(message.GetBody()))
		return rocketmq.COMMIT
	}
	producer, err := p.producer("transaction", rocketmq.WithTransactionChecker(&rocketmq.TransactionChecker{Check: check}))
	if err != nil {
		return nil, err
	}
	defer producer.GracefulStop()
	consumer, err := p.consumer("transaction", "transaction", rocketmq.SUB_ALL)
	if err != nil {
		return nil, err
	}
	defer consumer.GracefulStop()
	for _, body := range []string{"committed", "rolled back", "checked"} {
		transaction := producer.BeginTransaction()
		if _, err := producer.SendWithTransaction(context.Background(), p.message("transaction", body), transaction); err != nil {
			return nil, err
		}
		end := map[string]func() error{"committed": transaction.Commit, "rolled back": transaction.RollBack}[body]
		if end == nil {
			continue
		}
		if err := end(); err != nil {
			return nil, err
		}
	}
	messages, err := p.receiveAndAcknowledge(consumer, 2)
	if err != nil {
		return nil, err
	}
	mutex.Lock()
	defer mutex.Unlock()
	return result{"received": sortedBodies(messages), "checked": checked}, nil
}

func (p *program) simple() (result, error) {
	producer, err := p.producer("simple")
	if err != nil {
		return nil, err
	}
	defer producer.GracefulStop()
	for _, body := range []string{"acked", "changed", "expires"} {
		if _, err := send(producer, p.message("simple", body)); err != nil {
			return nil, err
		}
	}
	consumer, err := p.consumer("simple", "simple", rocketmq.SUB_ALL)
	if err != nil {
		return nil, err
	}
	defer consumer.GracefulStop()
	found := newDeliveries()
	err = p.receive(consumer, func(message *rocketmq.MessageView) (bool, error) {
		var err error
		number, body := found.add(message, p.receiveStart), string(message.GetBody())
		if body == "acked" || number > 1 {
			err = consumer.Ack(context.Background(), message)
		} else if body == "changed" {
			err = consumer.ChangeInvisibleDuration(message, changed)
		}
		return len(found.all) == 5, err
	})
	return result{"deliveries": found.all}, err
}

func (p *program) push() (result, error) {
	producer, err := p.producer("push")
	if err != nil {
		return nil, err
	}
	defer producer.GracefulStop()
	for _, body := range []string{"ok", "fails once", "fails always"} {
		if _, err := send(producer, p.message("push", body)); err != nil {
			return nil, err
		}
	}
	found, err := p.consume("push", 6, func(body string, number int) bool {
		return body == "fails always" || body == "fails once" && number == 1
	})
	if err != nil {
		return nil, err
	}
	return result{"deliveries": found.all}, nil
}

func (p *program) filter() (result, error) {
	producer, err := p.producer("filter")
	if err != nil {
		return nil, err
	}
	defer producer.GracefulStop()
	for _, each := range [][3]string{{"b", "open", "50"}, {"a", "paid", "5"}, {"c", "late", "500"}} {
		message := p.message("filter", each[0])
		message.SetTag(each[1])
		message.AddProperty("amount", each[2])
		if _, err := send(producer, message); err != nil {
			return nil, err
		}
	}
	tags, err := p.selected("filter-tags", rocketmq.NewFilterExpression("paid || late"))
	if err != nil {
		return nil, err
	}
	sql, err := p.selected("filter-sql", rocketmq.NewFilterExpressionWithType("amount > 10", rocketmq.SQL92))
	return result{"tags": tags, "sql": sql}, err
}

func (p *program) selected(group string, expression *rocketmq.FilterExpression) ([]string, error) {
	consumer, err := p.consumer("filter", group, expression)
	if err != nil {
		return nil, err
	}
	defer consumer.GracefulStop()
	messages, err := p.receiveAndAcknowledge(consumer, 2)
	return sortedBodies(messages), err
}

func (p *program) rights() (result, error) {
	outcomes := make([]result, (len(os.Args)-5)/2)
	var group sync.WaitGroup
	for at := range outcomes {
		group.Add(1)
		go func() {
			defer group.Done()
			account := credentials.SessionCredentials{AccessKey: os.Args[5+2*at], AccessSecret: os.Args[6+2*at]}
			user := &program{endpoint: p.endpoint, prefix: p.prefix, credentials: account}
			sent, received := outcome(user.sendOne), outcome(user.receiveOne)
			outcomes[at] = result{"send": <-sent, "receive": <-received}
		}()
	}
	group.Wait()
	return result{"outcomes": outcomes}, nil
}

func (p *program) sendOne() error {
	producer, err := p.producer("rights")
	if err != nil {
		return err
	}
	defer producer.GracefulStop()
	_, err = send(producer, p.message("rights", "hello"))
	return err
}

func (p *program) receiveOne() error {
	consumer, err := p.consumer("rights", "rights", rocketmq.SUB_ALL)
	if err != nil {
		return err
	}
	defer consumer.GracefulStop()
	messages, err := consumer.Receive(context.Background(), 1, invisible)
	for _, message := range messages {
		if err := consumer.Ack(context.Background(), message); err != nil {
			return err
		}
	}
	if isNoMessage(err) {
		return nil
	}
	return err
}

// outcome starts a call, and gives "ok" or its error. A client that is refused retries to start, without an end.
func outcome(call func() error) <-chan string {
	text := make(chan string, 2)
	go func() {
		if err := call(); err != nil {
			text <- err.Error()
		} else {
			text <- "ok"
		}
	}()
	time.AfterFunc(refused, func() { text <- "the client does not start" })
	return text
}

// --- deliveries --------------------------------------------------------------------------------------------------------

type deliveries struct {
	mutex sync.Mutex
	all   []result
	first map[string]time.Time
	more  chan struct{}
}

func newDeliveries() *deliveries {
	return &deliveries{all: []result{}, first: map[string]time.Time{}, more: make(chan struct{}, 100)}
}

// add adds a delivery by a call that started at a time, and returns how often its body was delivered.
func (d *deliveries) add(message *rocketmq.MessageView, start time.Time) int {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	body := string(message.GetBody())
	if _, ok := d.first[body]; !ok {
		d.first[body] = start
	}
	after := time.Since(d.first[body]).Milliseconds()
	d.all = append(d.all, result{"body": body, "attempt": message.GetDeliveryAttempt(), "after_ms": after})
	number := 0
	for _, each := range d.all {
		if each["body"] == body {
			number++
		}
	}
	d.more <- struct{}{}
	return number
}

func (d *deliveries) await(count int) {
	over := time.After(timeout)
	for ; count > 0; count-- {
		select {
		case <-d.more:
		case <-over:
			return
		}
	}
}

func (d *deliveries) bodies() []string {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	bodies := []string{}
	for _, each := range d.all {
		bodies = append(bodies, each["body"].(string))
	}
	return bodies
}
