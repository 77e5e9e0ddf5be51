package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"example.com/specdraft/clients/go/internal/fakedrafter"
)

// ctl runs a command line; what it printed, what it complained about, and its exit code.
func ctl(t *testing.T, arguments ...string) (string, string, int) {
	t.Helper()
	var out, complaints bytes.Buffer
	code := run(t.Context(), &out, &complaints, arguments)
	return out.String(), complaints.String(), code
}

func TestHelpAndMistakes(t *testing.T) {
	if _, said, code := ctl(t, "--help"); code != 0 || !strings.Contains(said, "watch") {
		t.Error(said, code)
	}
	for _, wrong := range [][]string{{}, {"nothing"}, {"info", "--no-such-flag"}} {
		if _, said, code := ctl(t, wrong...); code != usageCode || said == "" {
			t.Errorf("%v: %q %d", wrong, said, code)
		}
	}
	if _, said, code := ctl(t, "info", "--target", "unix:///nowhere/s.sock", "--timeout", "100ms"); code != 1 || said == "" {
		t.Error(said, code)
	}
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "prompt.json")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestProposeDraftsForAFile(t *testing.T) {
	service, err := fakedrafter.Start(fakedrafter.Options{HostMemory: true})
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	row := "[0,1,2,3,4,5,6,7]"
	good := write(t, fmt.Sprintf(`{"tokens": [1,2,3], "hiddens": [%s,%s]}`, row, row))
	out, said, code := ctl(t, "propose", "--target", service.Target(), "--drafts", "2", good)
	if code != 0 || strings.Count(out, "0.607") != 2 || !strings.Contains(out, "complete") {
		t.Error(out, said, code)
	}
	if out, said, code := ctl(t, "propose", "--json", "--target", service.Target(), good); code != 0 || !strings.Contains(out, `"drafts":[7,7,7]`) {
		t.Error(out, said, code)
	}
	for _, wrong := range []string{`{`, `{"tokens": [1,2], "hiddens": []}`, `{"tokens": [1,2,3], "hiddens": [[1],[1,2]]}`} {
		if _, said, code := ctl(t, "propose", "--target", service.Target(), write(t, wrong)); code != 1 || said == "" {
			t.Errorf("%s: %q %d", wrong, said, code)
		}
	}
	if _, _, code := ctl(t, "propose", "--target", service.Target()); code != 1 {
		t.Error(code)
	}
}

// serveTLS starts a fake that wants a certificate of the CA's, and returns where the files are.
func serveTLS(t *testing.T) (*fakedrafter.Service, string) {
	t.Helper()
	directory := t.TempDir()
	if err := fakedrafter.WriteCertificates(directory); err != nil {
		t.Fatal(err)
	}
	own, err := tls.LoadX509KeyPair(filepath.Join(directory, "one.crt"), filepath.Join(directory, "one.key"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(directory, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(text)
	service, err := fakedrafter.Start(fakedrafter.Options{TLS: &tls.Config{
		Certificates: []tls.Certificate{own}, ClientCAs: roots, ClientAuth: tls.RequireAndVerifyClientCert,
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(service.Close)
	return service, directory
}

func TestOverTCPBothSidesShowACertificate(t *testing.T) {
	service, files := serveTLS(t)
	in := func(name string) string { return filepath.Join(files, name) }
	row := "[0,1,2,3,4,5,6,7]"
	asked := write(t, fmt.Sprintf(`{"tokens": [1,2,3], "hiddens": [%s,%s]}`, row, row))
	all := []string{"propose", "--target", service.Target(), "--timeout", "3s", "--tls-ca", in("ca.crt")}
	good := append(all[:len(all):len(all)], "--tls-cert", in("one.crt"), "--tls-key", in("one.key"), asked)
	if out, said, code := ctl(t, good...); code != 0 || !strings.Contains(out, "complete") {
		t.Error(out, said, code)
	}
	for _, wrong := range [][]string{
		append(all[:len(all):len(all)], asked),
		append(all[:len(all):len(all)], "--tls-cert", in("nothing"), "--tls-key", in("one.key"), asked),
		{"propose", "--target", service.Target(), "--timeout", "300ms", asked},
	} {
		if _, said, code := ctl(t, wrong...); code != 1 || said == "" {
			t.Errorf("%v: %q %d", wrong, said, code)
		}
	}
}

func TestWatchPrintsWhatWasAcceptedSinceTheLineBefore(t *testing.T) {
	scrapes := 0
	server := httptest.NewServer(http.HandlerFunc(func(answer http.ResponseWriter, _ *http.Request) {
		scrapes++
		n := float64(10 * scrapes)
		_, _ = fmt.Fprintf(answer, "# HELP x y\nspecdraft_proposals_total %v\nspecdraft_unjudged_proposals_total 1.0\n"+
			"specdraft_draft_tokens_total %v\nspecdraft_accepted_tokens_total %v\n"+
			"specdraft_accepted_tokens_per_index_total{draft_index=\"0\"} %v\n"+
			"specdraft_accepted_tokens_per_index_total{draft_index=\"1\"} %v\n", n, 2*n, n, 0.7*n, 0.3*n)
	}))
	defer server.Close()
	out, said, code := ctl(t, "watch", "--metrics", server.URL, "--every", "1ms", "--times", "2")
	if code != 0 || strings.Count(out, "      10      20       10    50%   70% 30%\n") != 2 {
		t.Errorf("%s %s %d", out, said, code)
	}
	empty := httptest.NewServer(http.NotFoundHandler())
	defer empty.Close()
	if _, said, code := ctl(t, "watch", "--metrics", empty.URL); code != 1 || !strings.Contains(said, "404") {
		t.Error(said, code)
	}
}
