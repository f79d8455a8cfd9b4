//! Clients of a listening socket, within bounds.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::OwnedSemaphorePermit;

/// Time limit for the head of a request, from the connection or from the last answer.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for everything on a connection.
const CONNECTION_LIMIT: Duration = Duration::from_secs(600);
/// How long no client is accepted after the system had no descriptors left.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves a client, which has a place among all clients until it has gone.
pub fn serve<S>(stream: S, router: Router, place: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    tokio::spawn(async move {
        let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
            answer(router.clone(), request.map(Body::new))
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_LIMIT)
            .serve_connection(TokioIo::new(stream), service);
        // A client's errors and its end are its own.
        let _ = tokio::time::timeout(CONNECTION_LIMIT, connection).await;
        drop(place);
    });
}

async fn answer(router: Router, request: axum::extract::Request) -> Result<Response, Infallible> {
    use tower_service::Service as _;
    let mut router = router;
    let mut response = router.call(request).await?;
    let name = HeaderValue::from_static(concat!("ebb/", env!("CARGO_PKG_VERSION"), " ebbd"));
    response.headers_mut().insert(header::SERVER, name);
    Ok(response)
}
