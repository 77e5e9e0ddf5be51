package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"example.com/specdraft/clients/go/specdraft"
	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// rawCalls are calls of the generated stubs, for what a client that behaves never sends.
type rawCalls struct {
	mu      sync.Mutex
	conns   map[string]*grpc.ClientConn
	streams map[string]*rawStream
}

type rawStream struct {
	pb.Drafter_DriveClient
	cancel context.CancelFunc
}

func newRawCalls() *rawCalls {
	return &rawCalls{conns: map[string]*grpc.ClientConn{}, streams: map[string]*rawStream{}}
}

func (r *rawCalls) close() {
	for _, stream := range r.streams {
		stream.cancel()
	}
	for _, conn := range r.conns {
		_ = conn.Close() // the runner has ended
	}
}

func (r *rawCalls) conn(target string) (*grpc.ClientConn, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if conn := r.conns[target]; conn != nil {
		return conn, nil
	}
	conn, err := grpc.NewClient(target,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.WaitForReady(true)),
	)
	if err == nil {
		r.conns[target] = conn
	}
	return conn, err
}

func withToken(ctx context.Context, token []byte) context.Context {
	if len(token) == 0 {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, specdraft.TokenMetadataKey, string(token))
}

type rawArgs struct {
	Target    string          `json:"target"`
	Token     []byte          `json:"token"`
	RPC       string          `json:"rpc"`
	Request   json.RawMessage `json:"request"`
	TimeoutMs int64           `json:"timeout_ms"` // 0 = no deadline
}

func rawCall(ctx context.Context, d *driver, args rawArgs) (any, error) {
	method := pb.File_specdraft_v1_drafter_proto.Services().ByName("Drafter").Methods().ByName(protoreflect.Name(args.RPC))
	if method == nil {
		return nil, fmt.Errorf("no RPC is called %q", args.RPC)
	}
	request, response, err := messages(method)
	if err != nil {
		return nil, err
	}
	if err := protojson.Unmarshal(args.Request, request); err != nil {
		return nil, err
	}
	conn, err := d.raw.conn(args.Target)
	if err != nil {
		return nil, err
	}
	if args.TimeoutMs > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(args.TimeoutMs)*time.Millisecond)
		defer cancel()
	}
	if err := conn.Invoke(withToken(ctx, args.Token), "/specdraft.v1.Drafter/"+args.RPC, request, response); err != nil {
		return nil, specdraft.ErrorOf(err)
	}
	return asJSON(response)
}

func messages(method protoreflect.MethodDescriptor) (proto.Message, proto.Message, error) {
	input, err := protoregistry.GlobalTypes.FindMessageByName(method.Input().FullName())
	if err != nil {
		return nil, nil, err
	}
	output, err := protoregistry.GlobalTypes.FindMessageByName(method.Output().FullName())
	if err != nil {
		return nil, nil, err
	}
	return input.New().Interface(), output.New().Interface(), nil
}

type streamArgs struct {
	As      string          `json:"as"`
	Of      string          `json:"of"`
	Target  string          `json:"target"`
	Token   []byte          `json:"token"`
	Request json.RawMessage `json:"request"`
}

// streamOpen opens a Drive stream and waits until the service has taken it up.
func streamOpen(ctx context.Context, d *driver, args streamArgs) (any, error) {
	conn, err := d.raw.conn(args.Target)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(withToken(ctx, args.Token))
	stream, err := pb.NewDrafterClient(conn).Drive(ctx)
	if err == nil {
		var header metadata.MD
		if header, err = stream.Header(); err == nil && header == nil { // refused: receiving tells why
			_, err = stream.Recv()
		}
	}
	if err != nil {
		cancel()
		return nil, specdraft.ErrorOf(err)
	}
	d.raw.mu.Lock()
	defer d.raw.mu.Unlock()
	d.raw.streams[args.As] = &rawStream{stream, cancel}
	return nil, nil
}

// streamAsk sends one request, if there is one, and waits for the next answer.
func streamAsk(_ context.Context, d *driver, args streamArgs) (any, error) {
	d.raw.mu.Lock()
	stream := d.raw.streams[args.Of]
	d.raw.mu.Unlock()
	if stream == nil {
		return nil, fmt.Errorf("no stream is called %q", args.Of)
	}
	if len(args.Request) > 0 {
		frame := &pb.DriveRequest{}
		if err := protojson.Unmarshal(args.Request, frame); err != nil {
			return nil, err
		}
		_ = stream.Send(frame) // receiving tells why
	}
	answer, err := stream.Recv()
	if err != nil {
		return nil, specdraft.ErrorOf(err)
	}
	return asJSON(answer)
}

func streamClose(_ context.Context, d *driver, args streamArgs) (any, error) {
	d.raw.mu.Lock()
	defer d.raw.mu.Unlock()
	if stream := d.raw.streams[args.Of]; stream != nil {
		stream.cancel()
		delete(d.raw.streams, args.Of)
	}
	return nil, nil
}

// asJSON says a message by the names of its proto.
func asJSON(message proto.Message) (any, error) {
	text, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(message)
	return json.RawMessage(text), err
}
