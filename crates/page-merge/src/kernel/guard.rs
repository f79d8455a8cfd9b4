//! KSM's settings, changed for a while.

use super::error::KsmError;
use super::knobs::Values;
use super::sysfs::Ksm;

/// The right to change KSM's settings for the whole host. When it is dropped, all of them are as
/// they were when it was made.
///
/// There should be one at a time; nothing keeps other programs from changing them meanwhile.
#[derive(Debug)]
pub struct KsmGuard {
    ksm: Ksm,
    before: Values,
}

impl KsmGuard {
    /// Notes the present settings.
    ///
    /// # Errors
    /// [`KsmError::Permission`] if this user may not change them, or why they cannot be read.
    pub fn new(ksm: Ksm) -> Result<Self, KsmError> {
        ksm.check_writable()?;
        let before = ksm.settings()?;
        Ok(Self { ksm, before })
    }

    /// KSM, with everything that can be done to it.
    pub fn ksm(&self) -> &Ksm {
        &self.ksm
    }

    /// The settings as they were.
    pub fn before(&self) -> &Values {
        &self.before
    }
}

impl Drop for KsmGuard {
    fn drop(&mut self) {
        if let Err(error) = self.ksm.apply(&self.before) {
            tracing::warn!("the settings of KSM may not be what they were before: {error}");
        }
    }
}
