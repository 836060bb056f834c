// Calls of Go's gRPC client to the methods of tests/http2/grpc_kit.py. Called with ADDRESS; prints a JSON object of
// the results by name.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// bytesCodec passes messages as they are: the test needs no protobuf.
type bytesCodec struct{}

func (bytesCodec) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (bytesCodec) Unmarshal(data []byte, v any) error { *v.(*[]byte) = append([]byte{}, data...); return nil }
func (bytesCodec) Name() string                       { return "proto" }

var connection *grpc.ClientConn

func unary(ctx context.Context, method string, message []byte, options ...grpc.CallOption) ([]byte, error) {
	var answer []byte
	err := connection.Invoke(ctx, "/test.Service/"+method, &message, &answer, options...)
	return answer, err
}

func failure(err error) string {
	found, _ := status.FromError(err)
	return fmt.Sprintf("%s: %s", found.Code(), found.Message())
}

func stream(method string, messages []string, serverStreams bool) string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	description := &grpc.StreamDesc{ServerStreams: true, ClientStreams: !serverStreams}
	call, err := connection.NewStream(ctx, description, "/test.Service/"+method)
	if err != nil {
		return failure(err)
	}
	received := []string{}
	receive := func() error {
		var answer []byte
		err := call.RecvMsg(&answer)
		if err == nil {
			received = append(received, string(answer))
		}
		return err
	}
	for _, each := range messages {
		message := []byte(each)
		if err := call.SendMsg(&message); err != nil {
			return failure(err)
		}
		if !serverStreams {
			if err := receive(); err != nil {
				return failure(err)
			}
		}
	}
	call.CloseSend()
	for {
		if err := receive(); err == io.EOF {
			return strings.Join(received, ",")
		} else if err != nil {
			return strings.Join(received, ",") + " " + failure(err)
		}
	}
}

func concurrent(count int) string {
	var group sync.WaitGroup
	var lock sync.Mutex
	right := 0
	for number := range count {
		group.Add(1)
		go func() {
			defer group.Done()
			message := fmt.Sprintf("%d %s", number, strings.Repeat("x", number))
			ctx := metadata.AppendToOutgoingContext(context.Background(), "x-mq-request-id", message)
			answer, err := unary(ctx, "Echo", []byte(message))
			lock.Lock()
			defer lock.Unlock()
			if err == nil && string(answer) == message {
				right++
			}
		}()
	}
	group.Wait()
	return fmt.Sprint(right)
}

func main() {
	var err error
	large := 64 << 20
	connection, err = grpc.NewClient(
		os.Args[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(
			grpc.ForceCodec(bytesCodec{}), grpc.MaxCallRecvMsgSize(large), grpc.MaxCallSendMsgSize(large)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, PermitWithoutStream: true}),
	)
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	results := map[string]string{}
	big := make([]byte, 20<<20)
	answer, err := unary(ctx, "Echo", big)
	results["big"] = fmt.Sprint(len(answer), err)
	answer, err = unary(ctx, "Echo", []byte{})
	results["empty"] = fmt.Sprint(len(answer), err)
	results["concurrent"] = concurrent(2000)
	results["server stream"] = stream("Parts", []string{"5"}, true)
	results["chat"] = stream("Chat", []string{"a", "b", "c"}, false)
	results["ended chat"] = stream("Chat", []string{"a", "end"}, false)
	_, err = unary(ctx, "Fail", []byte("100 % ä"))
	results["failure"] = failure(err)
	_, err = unary(ctx, "Other", nil)
	results["unknown"] = failure(err)
	_, err = unary(ctx, "Echo", make([]byte, 10000), grpc.UseCompressor(gzip.Name))
	results["gzip"] = failure(err)
	short, cancelShort := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancelShort()
	_, err = unary(short, "Hold", nil)
	results["deadline"] = failure(err)[:16]
	cancelled, cancelNow := context.WithCancel(ctx)
	time.AfterFunc(50*time.Millisecond, cancelNow)
	_, err = unary(cancelled, "Hold", nil)
	results["cancelled"] = failure(err)[:8]
	after, err := unary(ctx, "Echo", []byte("still there"))
	results["after"] = fmt.Sprint(string(after), err)
	connection.Close()
	json.NewEncoder(os.Stdout).Encode(results)
}
