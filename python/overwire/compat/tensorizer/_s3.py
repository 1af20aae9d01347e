"""Finds credentials and endpoints for s3:// as tensorizer does, and returns them as storage_options."""

from __future__ import annotations

import os
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ... import read_bytes
from ...errors import AccessError, NotFoundError, OverwireError
from ...stores import presign

default_s3_read_endpoint = "accel-object.ord1.coreweave.com"
default_s3_write_endpoint = "object.ord1.coreweave.com"

# The granularity of expiry times. URLs are valid until the end of the next day, like tensorizer's.
_DAY = 86400


_SETTINGS = 1 << 20  # maximum bytes of a settings file


class ParsedCredentials(NamedTuple):
    """The credentials that were found. Missing values are None."""

    config_file: str | None
    s3_endpoint: str | None
    s3_access_key: str | None
    s3_secret_key: str | None
    use_https: bool | None


def s3cfg_values(config_paths: Any = None) -> ParsedCredentials:
    """Reads the section "default" of the first of these files that exists, by default
    `stream_io._s3_default_config_paths`. Raises ValueError for a file without that section."""
    import configparser

    from . import stream_io

    paths = config_paths or stream_io._s3_default_config_paths
    if isinstance(paths, (str, bytes, os.PathLike)):
        paths = (paths,)
    config = configparser.ConfigParser(interpolation=None)
    for path in paths:
        try:
            config.read_string(read_bytes(os.path.abspath(os.fsdecode(path)), _SETTINGS).decode())
        except (NotFoundError, AccessError):
            continue
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{os.fsdecode(path)} is not a .s3cfg file") from error
        if "default" not in config:
            raise ValueError(f"No default section in {os.fsdecode(path)}")
        section = config["default"]
        https = {"True": True, "False": False}.get(section.get("use_https", ""))
        return ParsedCredentials(
            os.fsdecode(path), section.get("host_base"), section.get("access_key"), section.get("secret_key"), https
        )
    return ParsedCredentials(None, None, None, None, None)


def infer_credentials(key: str | None, secret: str | None, config_path: Any = None) -> ParsedCredentials:
    """Returns a pair of credentials. Replaces None, but not "", with the value in .s3cfg.

    Raises ValueError if a part is not found, and FileNotFoundError if config_path does not exist.
    """
    if key is not None and secret is not None:
        return ParsedCredentials(None, None, key, secret, None)
    if config_path is not None and not os.path.exists(config_path):
        raise FileNotFoundError(f"Explicitly specified s3_config_path does not exist: {config_path}")
    begin = "Attempted to access an S3 bucket, but credentials were not provided, and "
    try:
        values = s3cfg_values(config_path)
    except ValueError as error:
        raise ValueError(begin + "the fallback .s3cfg file could not be parsed.") from error
    if values.config_file is None:
        raise ValueError(begin + "no default .s3cfg file could be found.")
    key = values.s3_access_key if key is None else key
    secret = values.s3_secret_key if secret is None else secret
    if not key or not secret:
        name = "s3_secret_access_key" if key else "s3_access_key_id"
        text = f"Attempted to access an S3 bucket, but {name} was not provided, and could not be found in the"
        raise ValueError(f"{text} default config file at {values.config_file}.")
    return values._replace(s3_access_key=key, s3_secret_key=secret)


def enforce_scheme(endpoint: str, allow_http: bool = False, force_http: bool = False) -> str:
    """Returns an endpoint with the scheme https, or with http if that is allowed or forced. Raises ValueError for http
    that is not allowed."""
    scheme, separator, rest = endpoint.partition("://")
    scheme = scheme.lower() if separator else ""
    if not separator:
        return ("http://" if force_http else "https://") + endpoint
    if scheme == "https":
        return "http://" + rest if force_http else endpoint
    if scheme == "http" and (force_http or allow_http):
        return endpoint
    raise ValueError("Non-HTTPS endpoint URLs are not allowed.")


def parse_uri(uri: str) -> tuple[str, str]:
    """Returns the bucket and the key of an s3:// URI. Raises ValueError for other URIs."""
    parts = urlsplit(uri, allow_fragments=False)
    if parts.scheme.lower() != "s3":
        raise ValueError(f"Invalid S3 URI: {uri}")
    return parts.netloc, parts.path.lstrip("/")


def configured_endpoint() -> str | None:
    """Returns the endpoint in the environment, or in the AWS tools' configuration."""
    import configparser

    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return os.environ[name]
    config = configparser.ConfigParser(interpolation=None)
    try:
        path = os.path.expanduser(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config")
        config.read_string(read_bytes(os.path.abspath(path), _SETTINGS).decode())
    except (configparser.Error, UnicodeDecodeError, OverwireError):
        return None  # signing reads the file again, and reports the error
    profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    for name in (f"profile {profile}", profile):
        if name in config:
            settings = dict(line.partition("=")[::2] for line in config[name].get("s3", "").splitlines())
            within = {key.strip(): value.strip() for key, value in settings.items()}
            return within.get("endpoint_url") or config[name].get("endpoint_url") or None
    return None


def options_for(
    write: bool,
    key: str | None = None,
    secret: str | None = None,
    endpoint: str | None = None,
    config_path: Any = None,
    force_http: bool | None = None,
    region: str | None = None,
) -> dict[str, Any]:
    """Returns the storage_options that access an object like tensorizer's open_stream.

    Credentials come from the first of these that has them: the arguments, .s3cfg, the AWS tools' configuration. The
    endpoint comes from the first of these that has one: the argument, .s3cfg, the environment, the AWS tools'
    configuration. By default it is CoreWeave's. Raises ValueError for an endpoint without TLS, unless the environment
    or force_http allows it.
    """
    from . import stream_io

    allow_http = False
    try:
        credentials = infer_credentials(key, secret, config_path)
        key, secret = credentials.s3_access_key, credentials.s3_secret_key
        endpoint = endpoint or credentials.s3_endpoint
        if force_http is None and credentials.use_https is not None:
            force_http = not credentials.use_https
    except (ValueError, FileNotFoundError):
        pass  # the bucket may be public, or the AWS tools may have credentials
    if not endpoint and (endpoint := configured_endpoint()):
        allow_http = True
    if not endpoint:
        endpoint = default_s3_write_endpoint if write else default_s3_read_endpoint
    # Uses the name in stream_io, because programs replace it to allow other endpoints.
    return direct_options(key, secret, stream_io._enforce_scheme(endpoint, allow_http, bool(force_http)), region)


def direct_options(key: str | None, secret: str | None, endpoint: str | None, region: str | None) -> dict[str, Any]:
    """Builds storage_options. An endpoint without a scheme uses TLS."""
    if endpoint and "://" not in endpoint:
        endpoint = "https://" + endpoint
    options: dict[str, Any] = {"endpoint_url": endpoint or None, "region": region}
    if key == secret == "":
        options["anon"] = True
    else:
        options |= {"key": key, "secret": secret}
    return {name: value for name, value in options.items() if value is not None}


def virtual_only(endpoint: str) -> bool:
    """Returns whether an endpoint needs the bucket in the host name."""
    return urlsplit(endpoint if "//" in endpoint else "//" + endpoint).netloc.lower() in ("cwobject.com", "cwlota.com")


def url_of(uri: str, options: dict[str, Any]) -> str:
    """Returns a URL that reads the object. The URL is not signed if unsigned access is requested, or if there are no
    credentials, because the bucket may be public. Raises ValueError for other URIs."""
    import time
    from urllib.parse import quote

    bucket, key = parse_uri(uri)
    if not options.get("anon"):
        try:
            return presign(uri, 2 * _DAY - int(time.time()) % _DAY, storage_options=options)
        except AccessError as error:
            if error.rule != "NoCredentials" or any(options.get(name) is not None for name in ("key", "secret")):
                raise  # the caller passed credentials
    at = urlsplit(options.get("endpoint_url") or f"https://s3.{options.get('region') or 'us-east-1'}.amazonaws.com")
    if virtual_only(at.netloc):
        return f"{at.scheme}://{bucket}.{at.netloc}/{quote(key)}"
    return f"{at.scheme}://{at.netloc}{at.path.rstrip('/')}/{bucket}/{quote(key)}"
