package s3

// This file finds AWS credentials.

import (
	"cmp"
	"context"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"net"
	"net/url"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/credentials/ec2rolecreds"
	"github.com/aws/aws-sdk-go-v2/credentials/endpointcreds"
	"github.com/aws/aws-sdk-go-v2/credentials/processcreds"
	"github.com/aws/aws-sdk-go-v2/credentials/ssocreds"
	"github.com/aws/aws-sdk-go-v2/credentials/stscreds"
	"github.com/aws/aws-sdk-go-v2/feature/ec2/imds"
	"github.com/aws/aws-sdk-go-v2/service/sso"
	"github.com/aws/aws-sdk-go-v2/service/ssooidc"
	"github.com/aws/aws-sdk-go-v2/service/sts"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source/route"
)

// A chain finds credentials in the same order as AWS's own tools, but with Python's environment, which is in
// settings: the caller's keys or profile, AWS_ACCESS_KEY_ID, a web identity (IRSA), the profile (keys, a role
// of another profile, SSO, a process), the container's endpoint, the instance's metadata (version 2 only).
type chain struct {
	*settings
	http    bounded
	guessed bool // the provider uses the instance's metadata
}

// firstProvider returns the first configured provider, or nil for unsigned requests.
func (c *chain) firstProvider(ctx context.Context) (aws.CredentialsProvider, error) {
	o := c.opt.Storage
	if c.anon {
		return nil, nil
	}
	var p aws.CredentialsProvider
	var err error
	switch {
	case o["key"] != "" && o["secret"] != "":
		p, err = staticKeys(aws.Credentials{AccessKeyID: o["key"], SecretAccessKey: o["secret"],
			SessionToken: o["token"]},
			errs.ErrArgument, "storage_options: key", "storage_options: secret", "storage_options: token")
	case o["key"] != "" || o["secret"] != "" || o["token"] != "":
		return nil, errs.New(errs.ErrArgument,
			"storage_options: key and secret must be set together, and token only with both")
	case o["profile"] != "":
		p, err = c.fromProfile(ctx, &c.profile, 0)
	case c.environmentKeys().HasKeys():
		p, err = c.environmentProvider()
	case c.env("AWS_WEB_IDENTITY_TOKEN_FILE") != "":
		p, err = c.webIdentity(ctx, c.env("AWS_WEB_IDENTITY_TOKEN_FILE"), c.env("AWS_ROLE_ARN"),
			c.env("AWS_ROLE_SESSION_NAME"))
	default:
		p, err = c.fromProfile(ctx, &c.profile, 0)
	}
	if err != nil {
		return nil, err
	}
	if _, isStatic := p.(credentials.StaticCredentialsProvider); isStatic {
		return p, nil
	}
	return aws.NewCredentialsCache(cleaned{p}, func(o *aws.CredentialsCacheOptions) {
		o.ExpiryWindow = 2 * time.Minute
	}), nil
}

// cleanKeys removes a trailing line break from credentials, because secrets created in a shell often have one. A line
// break elsewhere gives an error of the given class that names the credential.
func cleanKeys(keys aws.Credentials, class error, names ...string) (aws.Credentials, error) {
	for i, word := range []*string{&keys.AccessKeyID, &keys.SecretAccessKey, &keys.SessionToken} {
		*word = strings.TrimSpace(*word)
		if strings.ContainsFunc(*word, unicode.IsControl) {
			return keys, errs.New(class, "%s: expected a value without line breaks or control characters", names[i])
		}
	}
	return keys, nil
}

func staticKeys(keys aws.Credentials, class error, names ...string) (aws.CredentialsProvider, error) {
	keys, err := cleanKeys(keys, class, names...)
	return credentials.StaticCredentialsProvider{Value: keys}, err
}

// cleaned applies cleanKeys to the credentials of a service or a program.
type cleaned struct{ aws.CredentialsProvider }

// Retrieve returns the cleaned credentials.
func (c cleaned) Retrieve(ctx context.Context) (aws.Credentials, error) {
	keys, err := c.CredentialsProvider.Retrieve(ctx)
	if err != nil {
		return keys, err
	}
	return cleanKeys(keys, errs.ErrPermission, "the received access key", "the received secret key",
		"the received session token")
}

func (c *chain) environmentProvider() (aws.CredentialsProvider, error) {
	return staticKeys(c.environmentKeys(), errs.ErrPermission, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
		"AWS_SESSION_TOKEN")
}

func (c *chain) environmentKeys() aws.Credentials {
	return aws.Credentials{
		AccessKeyID:     cmp.Or(c.env("AWS_ACCESS_KEY_ID"), c.env("AWS_ACCESS_KEY")),
		SecretAccessKey: cmp.Or(c.env("AWS_SECRET_ACCESS_KEY"), c.env("AWS_SECRET_KEY")),
		SessionToken:    c.env("AWS_SESSION_TOKEN"),
	}
}

// fromProfile returns the provider of a profile. A role may refer to another profile.
func (c *chain) fromProfile(ctx context.Context, p *config.SharedConfig, depth int) (aws.CredentialsProvider, error) {
	if depth > 8 {
		return nil, errs.New(errs.ErrArgument, "profile %q: more than 8 profiles refer to each other", p.Profile)
	}
	var base aws.CredentialsProvider
	var err error
	switch {
	case p.Source != nil:
		base, err = c.fromProfile(ctx, p.Source, depth+1)
	case p.Credentials.HasKeys():
		name := fmt.Sprintf("profile %q: ", p.Profile)
		base, err = staticKeys(p.Credentials, errs.ErrPermission, name+"aws_access_key_id",
			name+"aws_secret_access_key", name+"aws_session_token")
	case p.CredentialSource != "":
		base, err = c.namedProvider(p.CredentialSource)
	case p.WebIdentityTokenFile != "":
		return c.webIdentity(ctx, p.WebIdentityTokenFile, p.RoleARN, p.RoleSessionName)
	case p.SSOAccountID != "" || p.SSORoleName != "":
		base, err = c.singleSignOn(p)
	case p.LoginSession != "":
		return nil, errs.New(errs.ErrNotSupported,
			"profile %q uses `aws login`: export keys to the environment with `aws configure export-credentials`",
			p.Profile)
	case p.CredentialProcess != "":
		base = c.processProvider(p.CredentialProcess)
	case c.env("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") != "" || c.env("AWS_CONTAINER_CREDENTIALS_FULL_URI") != "":
		base, err = c.containerProvider()
	default:
		base = c.instanceProvider()
		c.guessed = depth == 0 && p.RoleARN == "" && !c.profiled
	}
	if err != nil || p.RoleARN == "" {
		return base, err
	}
	return c.roleProvider(ctx, p, base)
}

func (c *chain) namedProvider(where string) (aws.CredentialsProvider, error) {
	switch where {
	case "Environment":
		return c.environmentProvider()
	case "EcsContainer":
		return c.containerProvider()
	case "Ec2InstanceMetadata":
		return c.instanceProvider(), nil
	}
	return nil, errs.New(errs.ErrArgument,
		"credential_source %q: expected Environment, EcsContainer or Ec2InstanceMetadata", where)
}

// stsClient returns the client that exchanges identities for keys.
func (c *chain) stsClient(ctx context.Context, as aws.CredentialsProvider) (*sts.Client, error) {
	endpoint, err := c.endpointFor(ctx, "STS", "")
	if err != nil {
		return nil, err
	}
	o := sts.Options{Region: c.region, Credentials: as, HTTPClient: c.http}
	if endpoint != "" {
		o.BaseEndpoint = &endpoint
	}
	return sts.New(o), nil
}

func (c *chain) webIdentity(ctx context.Context, file, role, session string) (aws.CredentialsProvider, error) {
	if role == "" {
		return nil, errs.New(errs.ErrArgument, "a web identity needs a role: AWS_ROLE_ARN, or role_arn in the profile")
	}
	client, err := c.stsClient(ctx, aws.AnonymousCredentials{})
	if err != nil {
		return nil, err
	}
	return stscreds.NewWebIdentityRoleProvider(client, role, stscreds.IdentityTokenFile(file),
		func(o *stscreds.WebIdentityRoleOptions) {
			o.RoleSessionName = session
		}), nil
}

func (c *chain) roleProvider(ctx context.Context, p *config.SharedConfig,
	as aws.CredentialsProvider) (aws.CredentialsProvider, error) {
	if p.MFASerial != "" {
		return nil, errs.New(errs.ErrNotSupported,
			"profile %q requires MFA: set the keys of a session in the environment", p.Profile)
	}
	client, err := c.stsClient(ctx, aws.NewCredentialsCache(as))
	if err != nil {
		return nil, err
	}
	return stscreds.NewAssumeRoleProvider(client, p.RoleARN, func(o *stscreds.AssumeRoleOptions) {
		o.RoleSessionName = p.RoleSessionName
		if p.ExternalID != "" {
			o.ExternalID = &p.ExternalID
		}
		if d := p.RoleDurationSeconds; d != nil {
			o.Duration = *d
		}
	}), nil
}

// singleSignOn uses the token that `aws sso login` stored in the home folder.
func (c *chain) singleSignOn(p *config.SharedConfig) (aws.CredentialsProvider, error) {
	region, name := p.SSORegion, p.SSOStartURL
	if p.SSOSession != nil {
		region, name = p.SSOSession.SSORegion, p.SSOSession.Name
	}
	if region == "" || name == "" || p.SSOAccountID == "" || p.SSORoleName == "" {
		return nil, errs.New(errs.ErrArgument,
			"profile %q: single sign-on needs sso_account_id, sso_role_name, sso_region and sso_start_url", p.Profile)
	}
	sum := sha1.Sum([]byte(name))
	file := filepath.Join(c.homeFolder(), ".aws", "sso", "cache", hex.EncodeToString(sum[:])+".json")
	return ssocreds.New(sso.New(sso.Options{Region: region, HTTPClient: c.http}), p.SSOAccountID, p.SSORoleName,
		p.SSOStartURL, func(o *ssocreds.Options) {
			o.CachedTokenFilepath = file
			if p.SSOSession != nil {
				o.SSOTokenProvider = ssocreds.NewSSOTokenProvider(
					ssooidc.New(ssooidc.Options{Region: region, HTTPClient: c.http}), file)
			}
		}), nil
}

// processProvider runs the profile's credential_process in Python's environment.
func (c *chain) processProvider(command string) aws.CredentialsProvider {
	return processcreds.NewProviderCommand(processcreds.NewCommandBuilderFunc(
		func(ctx context.Context) (*exec.Cmd, error) {
			cmd := exec.CommandContext(ctx, "/bin/sh", "-c", command)
			env := cmd.Environ() // PATH and the rest of the environment, from the start of the process
			env = slices.DeleteFunc(env, func(s string) bool { return strings.HasPrefix(s, "AWS_") })
			for k, v := range c.opt.Env {
				env = append(env, k+"="+v)
			}
			cmd.Env = env
			return cmd, nil
		}))
}

// containerProvider requests credentials from the endpoint of ECS or EKS. Without TLS, only this machine and
// the addresses of these services are permitted.
func (c *chain) containerProvider() (aws.CredentialsProvider, error) {
	at := c.env("AWS_CONTAINER_CREDENTIALS_FULL_URI")
	if path := c.env("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"); path != "" {
		at = "http://169.254.170.2" + path
	}
	u, err := url.Parse(at)
	if err != nil || u.Hostname() == "" {
		return nil, errs.New(errs.ErrArgument,
			"the container's credentials: AWS_CONTAINER_CREDENTIALS_FULL_URI is not a URL")
	}
	if u.Scheme != "https" && !containerHost(u.Hostname()) {
		return nil, errs.New(errs.ErrPermission,
			"the container's credentials: %s is neither an https URL nor an address of the container service",
			u.Hostname())
	}
	return endpointcreds.New(at, func(o *endpointcreds.Options) {
		o.HTTPClient = c.http
		o.AuthorizationToken = c.env("AWS_CONTAINER_AUTHORIZATION_TOKEN")
		if file := c.env("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); file != "" {
			o.AuthorizationTokenProvider = endpointcreds.TokenProviderFunc(func() (string, error) {
				b, err := regular.Read(file, regular.MaxSetting)
				return strings.TrimSpace(string(b)), err
			})
		}
	}), nil
}

func containerHost(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && (ip.IsLoopback() || slices.Contains([]string{"169.254.170.2", "169.254.170.23", "fd00:ec2::23"},
		ip.String()))
}

// instanceProvider requests credentials from the metadata service, version 2. Its timeout is short, because
// most machines do not have this service.
func (c *chain) instanceProvider() aws.CredentialsProvider {
	o := imds.Options{ClientEnableState: imds.ClientEnabled, EnableFallback: aws.FalseTernary,
		Endpoint: cmp.Or(c.env("AWS_EC2_METADATA_SERVICE_ENDPOINT"), c.profile.EC2IMDSEndpoint)}
	if strings.EqualFold(c.env("AWS_EC2_METADATA_DISABLED"), "true") {
		o.ClientEnableState = imds.ClientDisabled
	}
	mode := c.env("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE")
	if o.Endpoint == "" {
		o.Endpoint = "http://169.254.169.254"
		if strings.EqualFold(mode, "IPv6") || c.profile.EC2IMDSEndpointMode == imds.EndpointModeStateIPv6 {
			o.Endpoint = "http://[fd00:ec2::254]"
		}
	}
	direct := route.New(route.Settings{Dial: time.Second}) // never through a proxy
	direct.ResponseHeaderTimeout = 2 * time.Second
	direct.DisableKeepAlives = true
	o.HTTPClient = direct
	return ec2rolecreds.New(func(p *ec2rolecreds.Options) { p.Client = imds.New(o) })
}
