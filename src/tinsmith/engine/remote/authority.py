"""The authority: a server's own certificates, made when it starts.

Its key is in the memory of the process and nowhere else, so engines of a server that has gone
can talk to no other, and whoever reads the data folder can sign nothing. What it signs is good for
a day: a certificate is looked at when an engine connects, and each engine gets a new one.
"""

from __future__ import annotations

import datetime as dt
import ssl
from typing import TYPE_CHECKING

from tinsmith import extras
from tinsmith.engine.remote.credentials import (
    SERVER_NAME,
    Credentials,
    engine_name,
    load_chain,
    secured,
)
from tinsmith.errors import EngineError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

DAY = dt.timedelta(days=1)
_SKEW = dt.timedelta(hours=1)
"""How far the clocks of two machines may be apart."""

_LIFE = 3650 * DAY
"""Longer than any process lives, and with it the key."""


class Authority:
    def __init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric import ec
        except ModuleNotFoundError:
            raise EngineError(
                f"certificates need the package cryptography: {extras.install_line('cluster')}"
            ) from None
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign("tinsmith", self._key.public_key(), is_authority=True)
        self.pem = _pem(self._certificate)
        self._context: ssl.SSLContext | None = None
        self._renew_at = _now()

    def context(self) -> ssl.SSLContext:
        """For the server's side: always the same one, with a certificate that is good today."""
        if self._context is None or _now() >= self._renew_at:
            certificate, key = self.issue(SERVER_NAME, is_server=True)
            self._renew_at = _now() + DAY / 2
            if self._context is None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                self._context = secured(context, self.pem, certificate, key)
            else:
                load_chain(self._context, certificate, key)
        return self._context

    def credentials(self, address: str, slot: int, epoch: int) -> Credentials:
        self.context()
        certificate, key = self.issue(engine_name(slot, epoch))
        return Credentials(
            address=address,
            slot=slot,
            epoch=epoch,
            authority=self.pem,
            certificate=certificate,
            key=key,
        )

    def issue(
        self, name: str, *, is_server: bool = False, life: dt.timedelta = DAY
    ) -> tuple[str, str]:
        """A certificate for a name, and its key."""
        from cryptography.hazmat.primitives import serialization as s
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key.public_key(), is_server=is_server, life=life)
        pem = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
        return _pem(certificate), pem.decode()

    def _sign(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        *,
        is_authority: bool = False,
        is_server: bool = False,
        life: dt.timedelta = _LIFE,
    ) -> x509.Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = subject if is_authority else self._certificate.subject
        public = self._key.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_now() - _SKEW)
            .not_valid_after(_now() + life)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False
            )
            .add_extension(_usage(is_authority=is_authority), critical=True)
        )
        if not is_authority:
            # An engine's certificate makes nobody a server.
            usage = (
                ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
            )
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        if is_server:
            names = x509.SubjectAlternativeName([x509.DNSName(name)])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def _pem(certificate: x509.Certificate) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM).decode()
