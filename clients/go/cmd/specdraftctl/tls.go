package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// credentials are those of the TLS flags: mutual TLS, or plaintext without any of them.
func (s settings) credentials() (credentials.TransportCredentials, error) {
	if s.ca == "" && s.certificate == "" && s.key == "" {
		return insecure.NewCredentials(), nil
	}
	if s.ca == "" || s.certificate == "" || s.key == "" {
		return nil, errors.New("--tls-ca, --tls-cert and --tls-key go together")
	}
	own, err := tls.LoadX509KeyPair(s.certificate, s.key)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(s.ca)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s holds no certificate", s.ca)
	}
	return credentials.NewTLS(&tls.Config{RootCAs: roots, Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS12}), nil
}
