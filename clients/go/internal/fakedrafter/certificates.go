package fakedrafter

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// WriteCertificates writes ca.crt, and a certificate and key that it signed for both sides, one.crt and one.key, for
// 127.0.0.1.
func WriteCertificates(directory string) error {
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	oneKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	ca, one := template(1, "a test's CA"), template(2, "one")
	ca.IsCA, ca.BasicConstraintsValid, ca.KeyUsage = true, true, x509.KeyUsageCertSign
	one.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	one.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	signedCA, caErr := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	signedOne, oneErr := x509.CreateCertificate(rand.Reader, one, ca, &oneKey.PublicKey, caKey)
	key, keyErr := x509.MarshalPKCS8PrivateKey(oneKey)
	return errors.Join(caErr, oneErr, keyErr,
		write(directory, "ca.crt", "CERTIFICATE", signedCA),
		write(directory, "one.crt", "CERTIFICATE", signedOne),
		write(directory, "one.key", "PRIVATE KEY", key),
	)
}

func template(serial int64, name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(serial),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
	}
}

func write(directory, name, kind string, data []byte) error {
	return os.WriteFile(filepath.Join(directory, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data}), 0o600)
}
