//! Metrics for scrapers, and a page for browsers: at the daemon's socket, and at a loopback address
//! if one is given. There, nothing that changes anything can be reached.
//!
//! | request | answer |
//! | --- | --- |
//! | `GET /` | the page; its parts are `/page.css` and `/page.js` |
//! | `GET /metrics` | [`metrics`] |
//! | `GET /status` | as at the daemon's socket |
//!
//! Script and style are files of their own, so that the page's policy allows nothing inline: a name
//! that found its way into the page as markup could still not run.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::str::FromStr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn, map_response};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use tokio::sync::Semaphore;

use crate::api::{Problem, Shared, lock, status};
use crate::clients;
use crate::metrics::{self, render};

/// What the page may do: load its two files, and ask this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
                      connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// Most clients at a time.
const MOST_CLIENTS: usize = 100;

/// An address that only this host can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loopback(SocketAddr);

/// Why an address is not listened at.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// It is not an address.
    #[error("not an address and a port; 127.0.0.1:9532 is one")]
    Invalid,
    /// Other hosts could reach it.
    #[error(
        "{0} is not a loopback address, and clients are not authenticated here; give one such as \
         127.0.0.1, and put a proxy with authentication before it"
    )]
    NotLoopback(IpAddr),
    /// It cannot be used.
    #[error("cannot listen at {address}: {source}")]
    Unusable {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
}

impl FromStr for Loopback {
    type Err = ListenError;

    fn from_str(text: &str) -> Result<Self, ListenError> {
        let address: SocketAddr = text.parse().map_err(|_| ListenError::Invalid)?;
        if !address.ip().is_loopback() {
            return Err(ListenError::NotLoopback(address.ip()));
        }
        Ok(Self(address))
    }
}

impl Loopback {
    /// Listens at it.
    ///
    /// # Errors
    /// [`ListenError::Unusable`].
    pub fn bind(self) -> Result<TcpListener, ListenError> {
        let Self(address) = self;
        let unusable = |source| ListenError::Unusable { address, source };
        let listener = TcpListener::bind(address).map_err(unusable)?;
        listener.set_nonblocking(true).map_err(unusable)?;
        Ok(listener)
    }
}

/// Serves browsers and scrapers for ever.
///
/// # Errors
/// The socket cannot be used.
pub async fn serve(listener: TcpListener, engine: Shared) -> io::Result<Infallible> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let router = router(engine);
    let places = Arc::new(Semaphore::new(MOST_CLIENTS));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(clients::ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        clients::serve(stream, router.clone(), place);
    }
}

/// The routes at a loopback address.
fn router(engine: Shared) -> Router {
    let refused = |status, message| async move { Problem::new(status, message, "") };
    pages()
        .route("/status", get(async |engine| status(engine)))
        .fallback(move || refused(StatusCode::NOT_FOUND, "there is no such path here"))
        .method_not_allowed_fallback(move || {
            refused(StatusCode::METHOD_NOT_ALLOWED, "this address is only for reading")
        })
        .layer(from_fn(check_host))
        .layer(map_response(protect))
        .with_state(engine)
}

/// The page and metrics.
pub(crate) fn pages() -> Router<Shared> {
    let file = |content_type: &'static str, content: &'static str| {
        get(async move || ([(header::CONTENT_TYPE, content_type)], content))
    };
    Router::new()
        .route("/", file("text/html; charset=utf-8", include_str!("page/page.html")))
        .route("/page.css", file("text/css; charset=utf-8", include_str!("page/page.css")))
        .route("/page.js", file("text/javascript; charset=utf-8", include_str!("page/page.js")))
        .route("/metrics", get(async |engine| scrape(engine)))
        .layer(map_response(protect))
}

fn scrape(State(engine): State<Shared>) -> Result<Response, Problem> {
    // The text is made without the lock: decisions do not wait for it.
    let observed = lock(&engine).observed().ok_or_else(Problem::too_early)?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], render(&observed)).into_response())
}

/// Refuses requests for other hosts. A page of another site can have its own name resolve to this
/// host (DNS rebinding), and would then be of the same origin as this one.
async fn check_host(request: Request, next: Next) -> Result<Response, Problem> {
    if is_meant(request.headers(), request.uri().host()) {
        return Ok(next.run(request).await);
    }
    let message = "the request is for another host";
    let remedy = "use localhost, 127.0.0.1 or [::1]; a proxy has to set the header Host";
    Err(Problem::new(StatusCode::MISDIRECTED_REQUEST, message, remedy))
}

/// Whether all that a request says about its host is a name of this one.
fn is_meant(headers: &HeaderMap, in_target: Option<&str>) -> bool {
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    // A number cannot resolve to another address.
    let is_ours = |name: &str| {
        let six = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        name.eq_ignore_ascii_case("localhost")
            || name.parse().is_ok_and(|address: Ipv4Addr| address.is_loopback())
            || six.is_some_and(|it| it.parse().is_ok_and(|it: Ipv6Addr| it.is_loopback()))
    };
    let without_port = |host: &str| match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name.to_owned(),
        _ => host.to_owned(),
    };
    let is_named = host.to_str().is_ok_and(|host| is_ours(host) || is_ours(&without_port(host)));
    is_named && in_target.is_none_or(is_ours)
}

async fn protect(mut response: Response) -> Response {
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-store"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::is_meant as meant;
    use super::*;

    #[test]
    fn only_loopback_addresses_are_listened_at() {
        for text in ["127.0.0.1:9532", "[::1]:9532", "127.0.0.9:0"] {
            assert!(text.parse::<Loopback>().is_ok(), "{text}");
        }
        for text in ["0.0.0.0:9532", "[::]:9532", "192.168.1.1:80", "[::ffff:127.0.0.1]:80"] {
            let error = text.parse::<Loopback>().unwrap_err().to_string();
            assert!(error.contains("a proxy with authentication"), "{text}: {error}");
        }
        for text in ["", "127.0.0.1", "9532", "localhost:9532", "127.0.0.1:99999"] {
            let error = text.parse::<Loopback>().unwrap_err();
            assert!(matches!(error, ListenError::Invalid), "{text}: {error}");
        }
    }

    #[test]
    fn requests_for_other_hosts_are_refused() {
        let is_meant = |hosts: &[&str], in_target| {
            let mut headers = HeaderMap::new();
            for host in hosts {
                headers.append(header::HOST, HeaderValue::from_str(host).unwrap());
            }
            meant(&headers, in_target)
        };
        for host in ["localhost", "LocalHost:80", "127.0.0.1", "127.0.0.9:9", "[::1]", "[::1]:9"] {
            assert!(is_meant(&[host], None), "{host}");
            assert!(is_meant(&[host], Some("localhost")), "{host}");
        }
        for host in [
            "",
            ":80",
            "evil.example",
            "evil.example:80",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "localhost:evil",
            "localhost:80:80",
            "evil@localhost",
            "::1",
            "192.168.0.1",
            "[::2]",
            "127.1",
        ] {
            assert!(!is_meant(&[host], None), "{host}");
        }
        assert!(!is_meant(&[], None));
        assert!(!is_meant(&["localhost", "evil.example"], None));
        assert!(!is_meant(&["localhost"], Some("evil.example")));
    }
}
