//! Devices on the port and memory buses, and log lines that a guest can cause with them, at a limited
//! rate for each place in the code.

pub mod bus;
pub mod console;
pub mod platform;
pub mod serial;
pub mod virtio;

pub use ebb_balloon::LogLimit;

/// Warns of something that the guest did, at most a few times a minute for each place that says so.
macro_rules! guest_log {
    ($($argument:tt)+) => {{
        static LIMIT: std::sync::Mutex<$crate::devices::LogLimit> =
            std::sync::Mutex::new($crate::devices::LogLimit::new());
        let permit =
            LIMIT.lock().unwrap_or_else(std::sync::PoisonError::into_inner).permit(std::time::Instant::now());
        if let Some(suppressed) = permit {
            tracing::warn!(suppressed, $($argument)+);
        }
    }};
}
pub(crate) use guest_log;
