package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"example.com/specdraft/clients/go/specdraft"
	pb "example.com/specdraft/clients/go/specdraft/v1"
)

var errNotServing = errors.New("not serving")

// table prints lines with aligned columns, which tabs separate.
func table(out io.Writer, lines []string) error {
	writer := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if _, err := fmt.Fprintln(writer, strings.Join(lines, "\n")); err != nil {
		return err
	}
	return writer.Flush()
}

func printJSON(out io.Writer, message proto.Message) error {
	text, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true, Multiline: true}.Marshal(message)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, string(text))
	return err
}

func info(ctx context.Context, out io.Writer, flags settings, _ []string) error {
	client, err := dial(ctx, flags)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }() // the answer is there, or the error
	found, err := client.ServerInfo(ctx)
	if err != nil {
		return err
	}
	if flags.asJSON {
		return printJSON(out, found)
	}
	head, limits := found.GetHead(), found.GetLimits()
	lines := []string{
		fmt.Sprintf("service\t%s, protocol %d, pid %d", found.GetServiceVersion(), found.GetProtocolVersion(), found.GetPid()),
		fmt.Sprintf("head\t%s (%s), %d layer, fingerprint %.12s", head.GetModelType(), head.GetKind(), head.GetLayerCount(), head.GetFingerprint()),
		fmt.Sprintf("hidden states\t%s, %d elements", trimmed(head.GetHiddenSource()), head.GetHiddenWidth()),
		fmt.Sprintf("vocabulary\t%d ids, %d can be drafted", head.GetVocabSize(), head.GetDraftVocabSize()),
		fmt.Sprintf("sequence\tat most %d tokens, %d bytes of KV a row", head.GetMaxSeqLen(), head.GetKvBytesPerRow()),
		fmt.Sprintf("limits\t%d drafts, %d entries a call, %d pairs a catch-up, %d sessions", limits.GetMaxDrafts(),
			limits.GetProposeBatchMax(), limits.GetPrefillRowsMax(), limits.GetSessionsMax()),
		fmt.Sprintf("KV pool\t%d pages of %d rows", limits.GetKvPageCount(), limits.GetKvPageRowCount()),
		fmt.Sprintf("lease\t%d ms, grace %d ms", limits.GetLeaseMs(), limits.GetGraceMs()),
	}
	for _, name := range slices.Sorted(maps.Keys(found.GetLevers())) {
		lines = append(lines, fmt.Sprintf("lever %s\t%s", name, found.GetLevers()[name]))
	}
	return table(out, lines)
}

func trimmed(source pb.HiddenSource) string {
	return strings.ToLower(strings.TrimPrefix(source.String(), "HIDDEN_SOURCE_"))
}

// connect opens a connection for services beside Drafter.
func connect(target string, flags settings) (*grpc.ClientConn, error) {
	creds, err := flags.credentials()
	if err != nil {
		return nil, err
	}
	return grpc.NewClient(target, grpc.WithTransportCredentials(creds), grpc.WithNoProxy())
}

// dial opens a client.
func dial(ctx context.Context, flags settings) (*specdraft.Client, error) {
	creds, err := flags.credentials()
	if err != nil {
		return nil, err
	}
	return specdraft.Dial(ctx, flags.target, specdraft.WithTimeout(flags.timeout), specdraft.WithTransportCredentials(creds))
}

func health(ctx context.Context, out io.Writer, flags settings, _ []string) error {
	conn, err := connect(flags.target, flags)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // the answer is there, or the error
	ctx, cancel := context.WithTimeout(ctx, flags.timeout)
	defer cancel()
	answer, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, answer.GetStatus()); err != nil {
		return err
	}
	if answer.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		return errNotServing
	}
	return nil
}

func sessions(ctx context.Context, out io.Writer, flags settings, _ []string) error {
	admin := flags.admin
	if admin == "" {
		admin = flags.target + ".admin"
	}
	conn, err := connect(admin, flags)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // the answer is there, or the error
	ctx, cancel := context.WithTimeout(ctx, flags.timeout)
	defer cancel()
	answer, err := pb.NewDrafterAdminClient(conn).ListSessions(ctx, &pb.ListSessionsRequest{})
	if err != nil {
		return specdraft.ErrorOf(err)
	}
	if flags.asJSON {
		return printJSON(out, answer)
	}
	lines := []string{"session\tclient\tsequences\tage\tlease left\tstream"}
	for _, one := range answer.GetSessions() {
		stream := "no"
		if one.GetDriving() {
			stream = "yes"
		}
		lines = append(lines, fmt.Sprintf("%s\t%s\t%d\t%v\t%v\t%s", hex.EncodeToString(one.GetSessionId())[:12],
			one.GetClientName(), one.GetSequenceCount(), millis(one.GetAgeMs()), millis(one.GetLeaseLeftMs()), stream))
	}
	return table(out, lines)
}

func millis(count uint64) time.Duration {
	return (time.Duration(count) * time.Millisecond).Round(100 * time.Millisecond)
}

// prompt is the file that propose reads: t_0..t_n and h_0..h_{n-1}.
type prompt struct {
	Tokens  []uint32    `json:"tokens"`
	Hiddens [][]float32 `json:"hiddens"`
}

func readPrompt(path string) (prompt, error) {
	var read prompt
	text, err := os.ReadFile(path)
	if err != nil {
		return read, err
	}
	if err := json.Unmarshal(text, &read); err != nil {
		return read, fmt.Errorf("%s: %w", path, err)
	}
	if len(read.Hiddens) == 0 || len(read.Tokens) != len(read.Hiddens)+1 {
		return read, fmt.Errorf("%s: %d hidden rows need one token more than that, not %d", path, len(read.Hiddens), len(read.Tokens))
	}
	for index, row := range read.Hiddens {
		if len(row) != len(read.Hiddens[0]) {
			return read, fmt.Errorf("%s: row %d has %d elements, row 0 has %d", path, index, len(row), len(read.Hiddens[0]))
		}
	}
	return read, nil
}

func propose(ctx context.Context, out io.Writer, flags settings, arguments []string) error {
	if len(arguments) != 1 {
		return errors.New("propose needs one file")
	}
	asked, err := readPrompt(arguments[0])
	if err != nil {
		return err
	}
	client, err := dial(ctx, flags)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }() // the drafts are there, or the error
	info, err := client.ServerInfo(ctx)
	if err != nil {
		return err
	}
	session, err := client.OpenSession(ctx, specdraft.SessionOptions{
		HiddenSource: info.GetHead().GetHiddenSource(), ClientName: "specdraftctl",
	})
	if err != nil {
		return err
	}
	proposal, err := proposeFor(ctx, session, asked, flags.drafts)
	if err != nil {
		return err
	}
	if flags.asJSON {
		return json.NewEncoder(out).Encode(map[string]any{
			"drafts": proposal.Drafts, "logprobs": proposal.Logprobs, "stop_reason": proposal.StopReason.String(),
		})
	}
	lines := []string{"draft\tid\tprobability"}
	for index, id := range proposal.Drafts {
		lines = append(lines, fmt.Sprintf("%d\t%d\t%.3f", index+1, id, probability(proposal.Logprobs[index])))
	}
	lines = append(lines, strings.ToLower(strings.TrimPrefix(proposal.StopReason.String(), "STOP_REASON_")))
	return table(out, lines)
}

func proposeFor(ctx context.Context, session *specdraft.Session, asked prompt, drafts int) (*specdraft.Proposal, error) {
	sequence, err := session.OpenSequence(ctx, specdraft.SequenceOptions{})
	if err != nil {
		return nil, err
	}
	rows := specdraft.Float32Rows(slices.Concat(asked.Hiddens...), len(asked.Hiddens[0]))
	last := rows.Len() - 1
	if _, err := sequence.Prefill(ctx, asked.Tokens[:last+1], rows); err != nil {
		return nil, err
	}
	pairs := specdraft.Pairs{FirstKey: int64(last), Tokens: asked.Tokens[last+1:], Hiddens: rows.Slice(last, last+1)}
	return sequence.Propose(ctx, pairs, specdraft.Draft{Count: drafts})
}
