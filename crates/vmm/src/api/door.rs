//! What stands behind a connection: requests in, replies out.
//!
//! Connections, limits and HTTP are the same for every API; a [`Door`] has its routes, documents
//! and faults. [`MachineDoor`] is Ebb's own, `crate::firecracker` has the other.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use super::control::{ControlError, Document, Machine, Outcome, Wait};
use super::http::{MAX_BODY_BYTES, Request};
use super::reply::{Problem, Reply, Status};
use super::route::route;

/// An API behind a socket.
pub(crate) trait Door: Send + Sync {
    /// Executes `request` with the file descriptors that came with it. Bound by the rules of
    /// [`Machine::handle`].
    fn serve(&self, request: &Request<'_>, descriptors: Vec<OwnedFd>) -> Served;

    /// The reply to what is not a request, or not one that is served.
    fn refuse(&self, problem: Problem) -> Reply {
        problem.into()
    }

    /// Longest body of a request, in bytes.
    fn max_body_bytes(&self) -> usize {
        MAX_BODY_BYTES
    }

    /// Does what is due at `now` without a request, and returns when to be called again.
    fn on_time(&self, now: Instant) -> Option<Instant> {
        let _ = now;
        None
    }
}

/// Outcome of a request.
pub(crate) enum Served {
    /// The reply.
    Done(Reply),
    /// The reply is still to come.
    Await(Pending),
}

/// A reply that is still to come. Dropping it withdraws the request.
pub(crate) struct Pending(Box<dyn FnMut() -> Option<Reply> + Send>);

impl Pending {
    /// A reply that `poll` returns once.
    pub(crate) fn new(poll: impl FnMut() -> Option<Reply> + Send + 'static) -> Self {
        Self(Box::new(poll))
    }

    /// The reply that `reply` makes of an answer.
    pub(crate) fn of(
        mut wait: Wait,
        reply: impl Fn(Result<Document, ControlError>) -> Reply + Send + 'static,
    ) -> Self {
        Self::new(move || wait.poll().map(&reply))
    }

    /// The reply, once it is available.
    pub(super) fn poll(&mut self) -> Option<Reply> {
        (self.0)()
    }
}

/// Ebb's own API.
pub(crate) struct MachineDoor(pub Arc<dyn Machine>);

impl Door for MachineDoor {
    fn serve(&self, request: &Request<'_>, descriptors: Vec<OwnedFd>) -> Served {
        match carry_out(request, descriptors, &*self.0) {
            Ok((status, Outcome::Done(document))) => {
                Served::Done(Reply::document(status, &document))
            }
            Ok((_, Outcome::Await(wait))) => Served::Await(Pending::of(wait, late_reply)),
            Err(problem) => Served::Done(problem.into()),
        }
    }

    fn on_time(&self, now: Instant) -> Option<Instant> {
        self.0.on_time(now)
    }
}

/// The outcome of `request`, and the status if it is available at once.
fn carry_out(
    request: &Request<'_>,
    descriptors: Vec<OwnedFd>,
    vm: &dyn Machine,
) -> Result<(Status, Outcome), Problem> {
    let operation = route(request)?;
    if !descriptors.is_empty() && !operation.takes_descriptors() {
        let message = format!(
            "{} {} takes no file descriptors, and {} came with the request",
            request.method,
            request.path,
            descriptors.len()
        );
        return Err(Problem::new(Status::BadRequest, message)
            .with_remedy("send them with the request that takes them, after the earlier replies"));
    }
    let status = Status::of(&operation);
    Ok((status, vm.handle(operation, descriptors)?))
}

/// The reply after waiting.
fn late_reply(answer: Result<Document, ControlError>) -> Reply {
    match answer {
        Ok(document) => Reply::document(Status::Ok, &document),
        Err(error) => Problem::from(error).into(),
    }
}
