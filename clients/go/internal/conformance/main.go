// Command conformance drives the Go client for the conformance cases: requests on standard input, answers on standard
// output, one JSON object a line. tests/conformance/README.md has the protocol.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"google.golang.org/genproto/googleapis/rpc/code"

	"example.com/specdraft/clients/go/specdraft"
)

const lineMax = 64 << 20

// request is the envelope of one line; each operation reads the rest of the line by itself.
type request struct {
	ID uint64 `json:"id"`
	Do string `json:"do"`
}

type answer struct {
	ID    uint64   `json:"id"`
	OK    any      `json:"ok,omitempty"`
	Error *failure `json:"error,omitempty"`
}

type failure struct {
	Code         string            `json:"code"`
	Reason       string            `json:"reason"`
	Message      string            `json:"message"`
	Details      map[string]string `json:"details"`
	RetryDelayMs int64             `json:"retry_delay_ms"`
}

func main() {
	if err := serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

// serve performs every request in a goroutine of its own until the input ends.
func serve(in io.Reader, out io.Writer) error {
	d := newDriver()
	defer d.close()
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, lineMax)
	encoder := json.NewEncoder(out)
	var writing sync.Mutex
	var running sync.WaitGroup
	defer running.Wait()
	for lines.Scan() {
		line := append([]byte(nil), lines.Bytes()...)
		var asked request
		if err := json.Unmarshal(line, &asked); err != nil {
			return err
		}
		running.Go(func() {
			result := perform(d, asked, line)
			writing.Lock()
			defer writing.Unlock()
			_ = encoder.Encode(result) // a runner that is gone reads nothing
		})
	}
	return lines.Err()
}

func perform(d *driver, asked request, line []byte) answer {
	do, known := operations()[asked.Do]
	if !known {
		return answer{ID: asked.ID, Error: &failure{Code: "UNKNOWN_OPERATION", Message: asked.Do}}
	}
	result, err := do(context.Background(), d, line)
	if err != nil {
		return answer{ID: asked.ID, Error: describe(err)}
	}
	if result == nil {
		result = struct{}{}
	}
	return answer{ID: asked.ID, OK: result}
}

// describe says an error as the protocol does. LOCAL is what the client refused before it sent anything.
func describe(err error) *failure {
	var failed *specdraft.Error
	switch {
	case errors.As(err, &failed):
	case errors.Is(err, specdraft.ErrArgument):
		return &failure{Code: "LOCAL", Message: err.Error()}
	default:
		return &failure{Code: "DRIVER", Message: err.Error()}
	}
	said := &failure{
		Code:         code.Code_name[int32(failed.Code)],
		Message:      failed.Message,
		Details:      failed.Details,
		RetryDelayMs: failed.RetryDelay.Milliseconds(),
	}
	if failed.Reason != 0 {
		said.Reason = failed.Reason.String()
	}
	return said
}
