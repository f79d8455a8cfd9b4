//! Temporary changes of KSM's settings.

use super::error::KsmError;
use super::knobs::Values;
use super::sysfs::Ksm;

/// The right to change KSM's settings for the whole host. Dropping it restores all settings to
/// their values at its creation.
///
/// There should be one at a time; other programs can still change the settings meanwhile.
#[derive(Debug)]
pub struct KsmGuard {
    ksm: Ksm,
    before: Values,
}

impl KsmGuard {
    /// Records the present settings.
    ///
    /// # Errors
    /// [`KsmError::Permission`] if this user may not change them, or the error of reading them.
    pub fn new(ksm: Ksm) -> Result<Self, KsmError> {
        ksm.check_writable()?;
        let before = ksm.settings()?;
        Ok(Self { ksm, before })
    }

    /// KSM, without restrictions.
    pub fn ksm(&self) -> &Ksm {
        &self.ksm
    }

    /// The settings at the guard's creation.
    pub fn before(&self) -> &Values {
        &self.before
    }
}

impl Drop for KsmGuard {
    fn drop(&mut self) {
        if let Err(error) = self.ksm.apply(&self.before) {
            tracing::warn!("KSM's settings may not have been restored: {error}");
        }
    }
}
