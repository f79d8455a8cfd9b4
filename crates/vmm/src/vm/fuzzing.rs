//! Fuzz target: requests of the API with descriptors, up to the point where a machine uses them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::fork::check_request;
use super::migration::request::Order;
use super::save::Save;
use crate::api::control::{ControlError, Document, Machine, Operation, Outcome};
use crate::api::door::MachineDoor;

/// The checks of a machine without the machine.
struct Checks;

impl Machine for Checks {
    fn handle(
        &self,
        operation: Operation,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Outcome, ControlError> {
        match operation {
            Operation::Snapshot(target) => {
                let save = Save::new(target, descriptors, None)?;
                save.check().map_err(ControlError::failed)?;
                Err(ControlError::cancelled_save())
            }
            Operation::Migrate(request) => {
                let order = Order::new(*request, descriptors)?;
                assert_eq!(order.sockets.len(), 1 + usize::from(order.request.streams));
                Ok(Document::OpenApi.into())
            }
            Operation::Checkpoint(target) => {
                check_request(target, descriptors)?;
                Ok(Document::OpenApi.into())
            }
            _ => {
                assert!(descriptors.is_empty());
                Ok(Document::OpenApi.into())
            }
        }
    }
}

/// A client of the API that sends any requests with any descriptors: all are closed.
pub fn fuzz_descriptors(data: &[u8]) {
    crate::api::fuzz_client(data, &MachineDoor(Arc::new(Checks)));
}
