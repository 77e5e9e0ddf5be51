// Command benchdrive times Propose over Drive, and a bare echo over a stream, for the benchmark of the clients:
//
//	benchdrive TARGET ECHO_TARGET REQUEST_BYTES ANSWER_BYTES
//
// Each line of its input, "echo N" or "propose N", is answered by one line: a JSON list of N times in microseconds.
package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"example.com/specdraft/clients/go/specdraft"
)

const (
	drafts   = 3
	pairRows = 128 // rows of the sequence when a turn begins; a Propose adds one, and at twice as many it begins again
)

// plain passes bytes through.
type plain struct{}

func (plain) Marshal(message any) ([]byte, error) { return *message.(*[]byte), nil }

func (plain) Unmarshal(data []byte, message any) error {
	*message.(*[]byte) = data
	return nil
}

func (plain) Name() string { return "plain" }

func main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "benchdrive:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string) error {
	if len(arguments) != 4 {
		return fmt.Errorf("%d arguments", len(arguments))
	}
	cases := map[string]func() error{}
	stop, err := addEcho(ctx, cases, arguments[1], arguments[2], arguments[3])
	if err != nil {
		return err
	}
	defer stop()
	client, err := specdraft.Dial(ctx, arguments[0])
	if err != nil {
		return err
	}
	defer client.Close()
	if err := addPropose(ctx, cases, client); err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var name string
		var count int
		if _, err := fmt.Sscanf(lines.Text(), "%s %d", &name, &count); err != nil || cases[name] == nil {
			return fmt.Errorf("%q: %w", lines.Text(), err)
		}
		times := make([]float64, count)
		for index := range times {
			began := time.Now()
			if err := cases[name](); err != nil {
				return err
			}
			times[index] = float64(time.Since(began).Nanoseconds()) / 1000
		}
		if err := json.NewEncoder(os.Stdout).Encode(times); err != nil {
			return err
		}
	}
	return lines.Err()
}

// addEcho times a request and its answer over an open stream of bare bytes.
func addEcho(ctx context.Context, cases map[string]func() error, target, size, answerSize string) (func(), error) {
	requestBytes, err := strconv.Atoi(size)
	if err != nil {
		return nil, err
	}
	answerBytes, err := strconv.Atoi(answerSize)
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	description := &grpc.StreamDesc{StreamName: "Stream", ServerStreams: true, ClientStreams: true}
	stream, err := conn.NewStream(ctx, description, "/specdraft.bench.Echo/Stream", grpc.ForceCodec(plain{}))
	if err != nil {
		return nil, err
	}
	request := make([]byte, max(4, requestBytes))
	binary.LittleEndian.PutUint32(request, uint32(answerBytes))
	cases["echo"] = func() error {
		if err := stream.SendMsg(&request); err != nil {
			return err
		}
		var answer []byte
		return stream.RecvMsg(&answer)
	}
	return func() { _ = conn.Close() }, nil // the process ends
}

// addPropose times proposals at one key after the other, as of a target whose drafts are never accepted.
func addPropose(ctx context.Context, cases map[string]func() error, client *specdraft.Client) error {
	session, err := client.OpenSession(ctx, specdraft.SessionOptions{MaxDrafts: drafts})
	if err != nil {
		return err
	}
	sequence, err := session.OpenSequence(ctx, specdraft.SequenceOptions{})
	if err != nil {
		return err
	}
	width := session.HiddenWidth()
	values, tokens := make([]float32, pairRows*width), make([]uint32, pairRows)
	for index := range values {
		values[index] = float32(index*7919%1000)/500 - 1
	}
	for index := range tokens {
		tokens[index] = uint32(index * 37 % 100)
	}
	rows := specdraft.Float32Rows(values, width)
	if _, err := sequence.Catchup(ctx, specdraft.Pairs{Tokens: tokens, Hiddens: rows}); err != nil {
		return err
	}
	key := 0
	cases["propose"] = func() error {
		pairs := specdraft.Pairs{FirstKey: int64(pairRows + key), Tokens: tokens[key : key+1], Hiddens: rows.Slice(key, key+1)}
		key = (key + 1) % pairRows
		proposal, err := sequence.Propose(ctx, pairs, specdraft.Draft{Count: drafts})
		if err == nil && len(proposal.Drafts) != drafts {
			err = fmt.Errorf("%d drafts", len(proposal.Drafts))
		}
		return err
	}
	return nil
}
