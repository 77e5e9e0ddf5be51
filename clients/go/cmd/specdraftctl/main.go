// Command specdraftctl looks at a running specdraft service: what it is, whether it serves, who uses it, what it drafts
// and how much of that is accepted.
//
//	specdraftctl info                     # versions, head, limits, levers
//	specdraftctl health                   # exit code 0 = SERVING
//	specdraftctl sessions                 # over the admin socket
//	specdraftctl propose prompt.json      # drafts for a prompt with its hidden states
//	specdraftctl watch                    # acceptance, live, from the metrics
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"
)

const (
	targetVariable = "SPECDRAFT_TARGET"
	defaultTarget  = "unix:///run/specdraft/specdraft.sock"
	usageCode      = 2
)

// command is one of the things that it does.
type command struct {
	name, arguments, does string
	// run gets the flags that were parsed and the arguments after them.
	run func(ctx context.Context, out io.Writer, flags settings, arguments []string) error
}

// settings are the flags of all commands.
type settings struct {
	target  string
	admin   string
	metrics string
	timeout time.Duration
	every   time.Duration
	times   int
	drafts  int
	asJSON  bool
	// ca, certificate and key are files of mutual TLS.
	ca, certificate, key string
}

func commands() []command {
	return []command{
		{"info", "", "what the service is", info},
		{"health", "", "whether it serves; the exit code says so too", health},
		{"sessions", "", "the open sessions, over the admin socket", sessions},
		{"propose", "FILE", "drafts for a prompt: JSON with \"tokens\" [n + 1] and \"hiddens\" [n][width]", propose},
		{"watch", "", "acceptance by draft index, live, from the metrics", watch},
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	code := run(ctx, os.Stdout, os.Stderr, os.Args[1:])
	stop()
	os.Exit(code)
}

// run is main without the process: what is printed and the exit code.
func run(ctx context.Context, out, complaints io.Writer, arguments []string) int {
	var said settings
	flags := flag.NewFlagSet("specdraftctl", flag.ContinueOnError)
	flags.SetOutput(complaints)
	flags.Usage = func() { usage(complaints, flags) }
	flags.StringVar(&said.target, "target", targetOr(defaultTarget), "address of the service; $"+targetVariable)
	flags.StringVar(&said.admin, "admin", "", "address of the admin socket (default: the target's path and .admin)")
	flags.StringVar(&said.metrics, "metrics", "http://127.0.0.1:9464/metrics", "URL of the metrics, for watch")
	flags.DurationVar(&said.timeout, "timeout", 5*time.Second, "deadline of a call")
	flags.DurationVar(&said.every, "every", 2*time.Second, "time between two lines of watch")
	flags.IntVar(&said.times, "times", 0, "lines of watch; 0 = until interrupted")
	flags.IntVar(&said.drafts, "drafts", 3, "drafts that propose asks for")
	flags.StringVar(&said.ca, "tls-ca", "", "PEM CA that signed the service's certificate, for a target host:port")
	flags.StringVar(&said.certificate, "tls-cert", "", "PEM certificate of this client")
	flags.StringVar(&said.key, "tls-key", "", "PEM key of this client")
	flags.BoolVar(&said.asJSON, "json", false, "print JSON")
	if len(arguments) == 0 {
		flags.Usage()
		return usageCode
	}
	for _, one := range commands() {
		if one.name != arguments[0] {
			continue
		}
		if err := flags.Parse(arguments[1:]); err != nil {
			return codeOfFlags(err)
		}
		if err := one.run(ctx, out, said, flags.Args()); err != nil && !errors.Is(err, context.Canceled) {
			_, _ = fmt.Fprintln(complaints, "specdraftctl:", err) // there is nobody else to tell
			return 1
		}
		return 0
	}
	if err := flags.Parse(arguments); errors.Is(err, flag.ErrHelp) {
		return 0
	}
	flags.Usage()
	return usageCode
}

func codeOfFlags(err error) int {
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	return usageCode
}

func usage(complaints io.Writer, flags *flag.FlagSet) {
	text := "specdraftctl COMMAND [flags]\n\n"
	for _, one := range commands() {
		text += fmt.Sprintf("  %-9s %-5s %s\n", one.name, one.arguments, one.does)
	}
	_, _ = fmt.Fprint(complaints, text+"\n") // there is nobody else to tell
	flags.PrintDefaults()
}

func targetOr(otherwise string) string {
	if said := os.Getenv(targetVariable); said != "" {
		return said
	}
	return otherwise
}
